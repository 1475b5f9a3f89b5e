"""docs/from-agentrl.md says of everything that the original's users bring what it is here."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from-agentrl.md"

# What a script, its YAML, its task file and its samplers hold there; the flags are tested in
# test_familiar_flags.py.
BROUGHT = {
    "Scripts": """
        src/main.py src/sampling.py assets/fsdp2_dst.yml fsdp_config
        MACHINE_RANK NUM_MACHINES MASTER_ADDR MASTER_PORT NUM_PROCESSES
        NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME TORCH_DISTRIBUTED_BACKEND NCCL_TIMEOUT
        NCCL_IB_DISABLE NCCL_IB_HCA NCCL_NET_GDR_LEVEL TORCHDYNAMO_CAPTURE_SCALAR_OUTPUTS
        MONITOR_INTERVAL TORCH_NCCL_TRACE_BUFFER_SIZE LOG_LEVEL TOKENIZERS_PARALLELISM
        SWANLAB_API_KEY SWANLAB_PROJECT SWANLAB_WORKSPACE
        logs/as/RUN_train_RANK.log output/RUN/ --db_connection_string
    """,
    "YAML": """
        browse_agent scorer_agent models api_key base_url model max_retries retry_delay
        backoff_factor timeout max_prompt_length min_prompt_length enable_logging browse_tools
        default_purpose tokenizer_path status judge_prompt_template {question} {labeled_answer}
        {pred_answer}
    """,
    "Tasks and samplers": """
        id query answer scorer answer_schema system_prompt async_fn(model_answer,ground_truth)
        classS(AsyncSampler) asyncrun(self) self.create_chat_completions(messages,tools=…)
        asyncevaluate_record(self,record)->float
        MCPScorerFactory.register_scorer(name,async_fn) Task register_new_model Dataset
        SamplingScheduler MCPSampler messages CrossEntropy
    """,
}


def words_of(section: str) -> set[str]:
    """What stands in backquotes in a section, without white space."""
    text = PAGE.read_text(encoding="utf-8")
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return {re.sub(r"\s", "", word) for word in re.findall(r"`([^`]+)`", body)}


@pytest.mark.parametrize("section", BROUGHT)
def test_the_page_names_all_that_users_of_the_original_bring(section: str) -> None:
    missing = set(BROUGHT[section].split()) - words_of(section)
    assert not missing
