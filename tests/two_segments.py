"""A Record of two segments, as rows that `agentrl import` takes."""

from typing import Any

# The tree of the docstring of `TokenTree`, as two segments: the second shares three tokens.
OF_RECORD: dict[str, Any] = {
    "temperature": 1.0, "trained": True, "record": "train-0-x-t1-a0", "task": "train-0-x",
    "task_id": "x", "rollout": 1, "query": "how many <b>parts</b>?", "answer": "46",
    "scorer": "exact_match", "final_answer": "46", "stop_reason": "answered", "score": 1.0,
    "scores": {"exact_match": 1.0}, "advantage": 0.5, "reward": 1.0,
}  # fmt: skip
FIRST = {
    "input_ids": [1, 2, 3, 10, 11, 20, 21, 12, 13], "loss_mask": [0, 0, 0, 1, 1, 0, 0, 1, 1],
    "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.0, -0.125],
    "versions": [-1, -1, -1, 4, 4, -1, -1, 4, 5],
    "advantages": [0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0, -0.25, -0.25],
    "segment": 0, "parent_turn": None, "shared": 0,
    "turns": [
        {"turn": 0, "start": 3, "end": 5, "status": "completed", "finish_reason": "stop",
         "text": "let me look", "messages": [{"role": "user", "content": "how many?"}],
         "tool_calls": [{"name": "stock", "arguments": {"bin": "K7"}, "result": "46 <i>parts</i>",
                         "is_error": False}], "rewrite": None},
        {"turn": 1, "start": 7, "end": 9, "status": "completed", "finish_reason": "stop",
         "text": "forty-six", "messages": [{"role": "tool", "content": "46"}], "tool_calls": [],
         "rewrite": None},
    ],
}  # fmt: skip
SECOND = {
    "input_ids": [1, 2, 3, 30, 14], "loss_mask": [0, 0, 0, 0, 1],
    "logprobs": [0.0, 0.0, 0.0, 0.0, -2.0], "versions": [-1, -1, -1, -1, 5],
    "advantages": [0.0, 0.0, 0.0, 0.0, 0.5], "segment": 1, "parent_turn": 0, "shared": 3,
    "turns": [
        {"turn": 2, "start": 4, "end": 5, "status": "completed", "finish_reason": "length",
         "text": "e", "messages": [], "tool_calls": [], "rewrite": "agent"},
    ],
}  # fmt: skip
