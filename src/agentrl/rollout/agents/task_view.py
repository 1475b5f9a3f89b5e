"""The task as a sampler sees it: `self.task`, with the further fields of its line as attributes.

A file of the user's may declare which fields its tasks have:

    @register_new_model
    class RFTTask(Task):
        inputs: list[dict]
        target: str = ""

`self.task` of the samplers in the same file is then an `RFTTask`.
"""

from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.databases.documents import Task

_models: dict[str, type["TaskView"]] = {}  # by the module that declares them

Model = TypeVar("Model", bound=type["TaskView"])


class TaskView(BaseModel):
    """A task of the task file. It may be changed, and is stored nowhere."""

    model_config = ConfigDict(extra="allow")

    task_id: str | None = None
    split: str = "train"
    query: str = ""
    answer: Any = None
    scorer: str = "agentcpm"
    answer_schema: str | None = None
    system_prompt: str | None = None

    @classmethod
    def of(cls, task: Task, module: str) -> "TaskView":
        """The view of a task, of the class that `module` declares, if it does.

        Raises ValueError if the task lacks a field of that class.
        """
        own = {name: getattr(task, name) for name in cls.model_fields}
        kind = _models.get(module, TaskView)
        try:
            return kind.model_validate({**task.fields, **own})
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise ValueError(
                f"task {task.task_id} is no {kind.__name__}: `{field}`: {first['msg']}"
            ) from None

    async def save(self) -> Self:
        """Raises ValueError: no attempt may change a task that others work on."""
        raise ValueError("a task cannot be saved: other rollouts and later epochs have it too")


def register_new_model(model: Model) -> Model:
    """Declare the class of tasks for the samplers of its module. Returns it."""
    if isinstance(model, type) and issubclass(model, TaskView):
        _models[model.__module__] = model
    return model
