"""`from databases import Record, Task, register_new_model`: documents of the data chain.

`Task` is the task as a sampler sees it (`rollout/agents/task_view.py`); the stored one is the
ledger's own.
"""

from agentrl.databases.documents import DBRecordData, DispatchedSamplingTask, Record
from agentrl.rollout.agents.task_view import TaskView as Task
from agentrl.rollout.agents.task_view import register_new_model

__all__ = ["DBRecordData", "DispatchedSamplingTask", "Record", "Task", "register_new_model"]
