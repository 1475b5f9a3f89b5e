"""The checks that involve several flags. Each refusal has its reason.

The bounds and choices of one flag are in its declaration.
"""

from collections.abc import Iterator

from agentrl.configs.config import Config, RunConfig
from agentrl.configs.flag import ConfigError, comma_separated
from agentrl.configs.losses import loss_defaults
from agentrl.configs.sampling import AgentConfig, RewardConfig
from agentrl.configs.training import LossConfig, OptimizerConfig
from agentrl.configs.unused_flags import check_unused

FORK_ESTIMATORS = ("mean_std", "mean", "leave_one_out")  # `rollout/groups/fork_values.py`
_MIN_TURNS = 1  # the original AgentRL's default, which counts as not given

Refusals = Iterator[tuple[bool, str]]  # whether the refusal applies, and its message


def check_combinations(config: Config) -> None:
    """Raise `ConfigError` if flags contradict each other or if one of them would be ignored."""
    check_unused(config)
    for refusals in (
        _of_the_run(config.run),
        _of_the_loss(config.loss),
        _of_the_group(config.reward),
        _of_the_optimizer(config.optimizer),
        _of_sampling(config),
        _of_forks(config),
        _of_agents(config.agent),
        _of_devices(config),
    ):
        for refused, reason in refusals:
            if refused:
                raise ConfigError(reason)


def _of_the_run(run: RunConfig) -> Refusals:
    trackers = comma_separated(run.report_to)
    yield (
        len(trackers) > 1 and not {"none", "all"}.isdisjoint(trackers),
        f"--report_to {run.report_to}: none and all stand alone; name the trackers, or give one of "
        "the two",
    )


def _of_sampling(config: Config) -> Refusals:
    sampling = config.sampling
    longest = sampling.max_prompt_tokens
    yield (
        config.context.new_context != "disabled" and longest in (None, sampling.max_tokens),
        f"--new_context {config.context.new_context}: needs --max_prompt_tokens, below "
        f"--max_tokens ({sampling.max_tokens}), so that a prompt leaves room for its answer",
    )
    goes_on = config.context.enable_repetition_compress
    yield (
        goes_on and config.context.new_context == "disabled",
        "--enable_repetition_compress true: has no effect without --new_context, by which a "
        "trajectory goes on; give it, or --remove_repeated_turns",
    )
    yield (
        goes_on and config.context.repetition_early_stop_times < 1,
        "--enable_repetition_compress true: has no effect without --repetition_early_stop_times, "
        "at which a trajectory goes on in a new context; give it, or --remove_repeated_turns",
    )
    compares = config.reward.estimator != "score" and config.loss.loss_calculator != "CrossEntropy"
    yield (
        sampling.num_generations < 2 and compares,
        f"--num_generations {sampling.num_generations}: an advantage compares the rollouts of one "
        "task, so there must be at least 2",
    )


def _of_agents(agent: AgentConfig) -> Refusals:
    given = {
        "train_agents": agent.train_agents,
        "agent_of_turn": agent.agent_of_turn,
        "agent_models": agent.agent_models,
    }
    for flag, value in given.items():
        yield (
            value is not None and "program" not in (agent.agent_name, *_programs(agent)),
            f"--{flag} {value}: tells the agents of a program apart, and has no effect without "
            "--agent_name program; leave it out",
        )
    of_command = {
        "agent_sandbox": agent.agent_sandbox,
        "agent_memory_mib": agent.agent_memory_mib,
        "agent_cpu_seconds": agent.agent_cpu_seconds,
        "agent_processes": agent.agent_processes,
        "agent_disk_mib": agent.agent_disk_mib,
    }
    for flag, limit in of_command.items():
        yield (
            limit is not None and agent.agent_command is None,
            f"--{flag} {limit}: is for the program of --agent_command, which is not given; leave "
            "it out",
        )
    yield (
        agent.agent_processes is not None and agent.agent_sandbox is None,
        f"--agent_processes {agent.agent_processes}: outside of a sandbox the kernel counts all "
        "processes of the user; give --agent_sandbox too",
    )


def _programs(agent: AgentConfig) -> list[str]:
    """The agent that tasks may name, if there is a program to run."""
    return ["program"] if agent.agent_command or agent.agent_entry else []


def _of_the_group(reward: RewardConfig) -> Refusals:
    given = {
        "balance_equally true": reward.balance_equally,
        "efficient_rewarding true": reward.efficient_rewarding,
        f"min_turns {reward.min_turns}": reward.min_turns > _MIN_TURNS,
        f"reserve_context_error_count {reward.reserve_context_error_count}": bool(
            reward.reserve_context_error_count
        ),
    }
    for flag, is_given in given.items():
        yield (
            reward.balance_sample and is_given,
            f"--{flag}: has no effect with --balance_sample true, which decides alone what is "
            "trained of a group; give --balance_sample false too",
        )
    yield (
        reward.efficient_rewarding and bool(reward.reserve_context_error_count),
        f"--reserve_context_error_count {reward.reserve_context_error_count}: has no effect with "
        "--efficient_rewarding true, which keeps all; leave one of the two out",
    )


def _of_forks(config: Config) -> Refusals:
    turns, reward = config.sampling.fork_turns, config.reward
    yield (
        turns > 0 and reward.estimator not in FORK_ESTIMATORS,
        f"--fork_turns {turns}: the values of forked turns need --advantage "
        f"{', '.join(FORK_ESTIMATORS[:-1])} or {FORK_ESTIMATORS[-1]}, not {reward.estimator}",
    )
    moved = {
        "efficient_rewarding": reward.efficient_rewarding,
        "efficiency_bonus": reward.efficiency_bonus,
        "balance_sample": reward.balance_sample,
    }
    for flag, given in moved.items():
        yield (
            turns > 0 and given,
            f"--{flag} true: compares rollouts of a group as if all began with the prompt; leave "
            "it or --fork_turns out",
        )


def _of_devices(config: Config) -> Refusals:
    yield (
        config.lora.lora_rank > 0 and (config.parallel.tp_size > 1 or config.parallel.ep_size > 1),
        f"--lora_rank {config.lora.lora_rank}: an adapter cannot be split over --tp_size or "
        "--ep_size, because the model's plan for them does not know it; shard over data or use "
        "--cp_size",
    )
    oldest, bound = config.services.publish_steps - 1, config.staleness_bound
    allowed = "--sync_sampling allows none" if not bound else f"--max_staleness allows {bound}"
    yield (
        oldest > bound,
        f"--publish_steps {oldest + 1}: before a publication the services' weights are {oldest} "
        f"steps old and {allowed}, so that the run would wait for rows forever; publish more often",
    )
    yield (
        config.services.inf_share_gpus and not config.sampling.sync_sampling,
        "--inf_share_gpus: needs --sync_sampling, because services whose memory is given back "
        "cannot sample while the trainer computes",
    )
    yield (
        config.services.inf_share_gpus and config.services.weight_update == "distributed",
        "--weight_update distributed: not with --inf_share_gpus, because NCCL refuses two ranks on "
        "one GPU, here the trainer's and a service's; give disk or tensor",
    )


def _of_the_optimizer(optimizer: OptimizerConfig) -> Refusals:
    yield (
        optimizer.warmup_steps > 0 and optimizer.lr_scheduler_type == "constant",
        f"--warmup_steps {optimizer.warmup_steps:g}: has no effect with --lr_scheduler_type "
        "constant; give --lr_scheduler_type constant_with_warmup",
    )


def _of_the_loss(config: LossConfig) -> Refusals:
    loss = config.loss_calculator
    of_loss = loss_defaults(loss)
    decoupled = config.centre != "behaviour"
    cap_on_ratio = bool(config.rollout_is_threshold) and config.rollout_is is None
    yield (
        not of_loss.has_ratio and cap_on_ratio,
        f"--rollout_is_threshold with --loss_calculator {loss}: it has no ratio to cap; "
        "give it a weight with --rollout_is",
    )
    yield (
        config.rollout_is is not None and of_loss.weighs_sampler,
        f"--rollout_is {config.rollout_is}: {loss} has the weight between trainer and sampler "
        "already; leave it out",
    )
    yield (
        config.rollout_is is not None and not decoupled and of_loss.has_ratio,
        f"--rollout_is {config.rollout_is}: the ratio to the sampler's policy is in the loss "
        "already, so give --proximal_policy recompute or loglinear too",
    )
    yield (
        decoupled and cap_on_ratio and of_loss.has_ratio and not of_loss.weighs_sampler,
        f"--rollout_is_threshold: the ratio of {loss} is to the proximal policy "
        f"(--proximal_policy {config.centre}), so that there is no weight between trainer and "
        "sampler to cap; give it one with --rollout_is",
    )
    yield (
        loss == "KL-Cov" and config.centre == "recompute",
        "--proximal_policy recompute with --loss_calculator KL-Cov: its penalty |log r| and the "
        "penalty's gradient are 0 where the ratio is always 1; leave --proximal_policy out",
    )
    yield (
        config.kl_in_advantage and config.divergence != "k1",
        f"--kl_estimator {config.divergence}: as a penalty in the advantage it does not pull "
        "towards the reference policy, only k1 does; leave it or --kl_in_advantage out",
    )
    yield (
        config.epsilon_higher is not None and config.clip_ratio_high is not None,
        "--epsilon_higher and --clip_ratio_high: both say where the clip range ends above 1; "
        "give one of the two",
    )
    yield (
        config.out_of_date_decay is not None and config.is_strict,
        "--out_of_date_decay: with --strict_in_bound true the band is the clip range, whatever "
        "the staleness; leave one of the two out",
    )
    yield (
        bool(config.token_level_loss) and config.skip_length_normalization,
        "--skip_length_normalization true: has no effect with --token_level_loss true, the mean "
        "over tokens; give --token_level_loss false too",
    )
    yield (
        config.normalization_length is not None and config.normalisation != "constant",
        f"--normalization_length {config.normalization_length}: the loss is divided by the "
        "number of its tokens; give --skip_length_normalization true too",
    )
    yield (
        config.clip_cov_lb > config.clip_cov_ub,
        f"--clip_cov_lb {config.clip_cov_lb:g}: must not be above --clip_cov_ub "
        f"{config.clip_cov_ub:g}",
    )
