"""A sampler that joins a run, by what the run's database says, on a real mongod."""

import asyncio
from pathlib import Path

import pytest
from scripted_run import agent, begin_run, scheduler

from agentrl.configs import Config, ConfigError, parse_config
from agentrl.configs.run_flags import read_digests, stored_flags
from agentrl.databases.connection import RunDatabase
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.runs import describe
from agentrl.rollout.scheduling.joining import join

MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"


async def describe_run(database: RunDatabase, *flags: str) -> None:
    """As whoever starts the run does."""
    config = parse_config(["--model_name_or_path", str(MODEL), *flags])
    await describe(database, "id", stored_flags(config), read_digests(config))


async def joined(mongod: EmbeddedMongod, database: RunDatabase, *flags: str) -> Config:
    where = ["--run_name", database.name, "--db_connection_string", mongod.url]
    return await join([*where, *flags])


async def test_a_sampler_that_joins_needs_none_of_the_run_s_flags(
    mongod: EmbeddedMongod, database: RunDatabase, tmp_path: Path
) -> None:
    scorers = tmp_path / "scorers.py"
    scorers.write_text("")
    await describe_run(
        database, "--max_turns", "7", "--scorer_module", str(scorers), "--loss_calculator",
        "MINIRL", "--preferred_sampling_params", '{"top_p":0.9}', "--lease_seconds", "5",
        "--system_prompt", "$price", "--mcp_auth_token", "hush",
        "--mcp_manager_url", "http://tools/mcp", "--drop_zero_advantage", "false",
    )  # fmt: skip
    config = await joined(
        mongod, database, "--max_concurrent_samples_per_process", "3",
        "--mcp_manager_url", "http://10.0.0.1/mcp", "--mcp_auth_token", "own",
        "--preferred_sampling_params", '{"top_p": 0.9}', "--max_turns=7",
    )  # fmt: skip
    assert config.model.model_name_or_path == str(MODEL)
    assert (config.sampling.max_turns, config.sampling.lease_seconds) == (7, 5.0)
    assert config.sampling_params["top_p"] == 0.9
    assert config.reward.advantage == "mean" and not config.reward.drop_zero_advantage
    assert config.reward.scorer_module == str(scorers)
    assert config.agent.system_prompt == "$price"
    assert config.sampling.max_concurrent_samples_per_process == 3
    assert config.agent.mcp_manager_url == "http://10.0.0.1/mcp"
    assert config.agent.mcp_auth_token == "own"
    assert config.run.db_connection_string == mongod.url


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--max_turns", "8"], r"--max_turns 8: run .* has 7"),
        (["--preferred_sampling_params", '{"top_p": 1}'], r'--preferred_sampling_params .*"top_p"'),
        (["--adv_scaling", "5e-4"], r"--adv_scaling 5e-4: run .* has 1,"),
        (["--agent_name", "math"], r"--agent_name math: run .* has mcp"),
        (["--drop_zero_advantage", "false"], r"--drop_zero_advantage false: run .* has true"),
        (["--max_turn", "8"], r"unknown flag --max_turn"),
    ],
)
async def test_a_sampler_that_would_make_other_data_is_refused_with_both_values(
    mongod: EmbeddedMongod, database: RunDatabase, given: list[str], said: str
) -> None:
    await describe_run(database, "--max_turns", "7")
    with pytest.raises(ConfigError, match=said):
        await joined(mongod, database, *given)


async def test_files_may_lie_elsewhere_but_hold_the_same(
    mongod: EmbeddedMongod, database: RunDatabase, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs.py", tmp_path / "ours.py"
    theirs.write_text("a = 1\n")
    ours.write_text("a = 1\n")
    await describe_run(database, "--scorer_module", str(theirs))
    theirs.unlink()
    with pytest.raises(ConfigError, match=f"--scorer_module: run .* has it at {theirs}, which is"):
        await joined(mongod, database)
    config = await joined(mongod, database, "--scorer_module", str(ours))
    assert config.reward.scorer_module == str(ours)
    ours.write_text("a = 2\n")
    with pytest.raises(ConfigError, match=f"--scorer_module {ours}: run .* has {theirs}"):
        await joined(mongod, database, "--scorer_module", str(ours))


async def test_a_sampler_waits_for_its_run_and_makes_no_database_of_another_name(
    mongod: EmbeddedMongod, database: RunDatabase
) -> None:
    waiting = asyncio.create_task(joined(mongod, database))
    await asyncio.sleep(0.7)
    assert not waiting.done()
    await describe_run(database, "--max_turns", "9")
    assert (await waiting).sampling.max_turns == 9
    name = f"{database.name}-x"
    with pytest.raises(ConfigError, match=f"--run_name {name}: the database holds no such run"):
        await join(
            ["--run_name", name, "--db_connection_string", mongod.url, "--startup_timeout", "0.5"]
        )
    assert name not in await database.client.list_database_names()


async def test_a_sampler_without_a_database_is_told_what_it_needs() -> None:
    needed = r"--db_connection_string is needed: .*--run_name grpo`\)"
    with pytest.raises(ConfigError, match=needed):
        await join(["--run_name", "grpo"])
    with pytest.raises(ConfigError, match=r"--run_name is needed: .*--run_name RUN`\)"):
        await join(["--db_connection_string", "mongodb://db:27017"])


async def test_a_sampler_that_joined_earlier_ends_when_the_run_is_resumed_with_other_flags(
    mongod: EmbeddedMongod, database: RunDatabase
) -> None:
    await describe_run(database, "--max_turns", "7", "--learning_rate", "1e-3")
    config = await joined(mongod, database)
    first = await begin_run(database)
    async with scheduler(database, agent(lambda claim: 1.0), config) as sampler:
        sampling = asyncio.create_task(sampler.run())
        await describe_run(database, "--max_turns", "7", "--learning_rate", "1e-4")
        await first.release()
        second = await begin_run(database)
        await asyncio.sleep(1.5)
        assert not sampling.done(), "the trainer's flags are not a sampler's"
        await describe_run(database, "--max_turns", "8", "--tool_timeout", "3")
        await second.release()
        await begin_run(database)
        with pytest.raises(ConfigError, match=r"other flags than .* \(--max_turns 7 → 8\): start"):
            await asyncio.wait_for(sampling, 20)
