"""A demonstration as the token tree of a rollout that said the same.

The prompt is rendered, the demonstrated turn is written as the chat template writes it behind such
a prompt, and the conversation goes on from there as in sampling (`rollout.chat.conversation`). The
mask is 1 on the turn's tokens and on the token that ends it: no more is sampled, and no less.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from agentrl.databases.token_tree import TokenTree
from agentrl.policy_version import VersionSpan
from agentrl.rollout.chat import ChatRenderer, Conversation, Message
from agentrl.rollout.chat.capabilities import Tools
from agentrl.rollout.chat.tokens import TokenContext
from agentrl.rollout.chat.turns import TurnReading, find_thought
from agentrl.rollout.chat.written import WrittenTurn, saying, turn_behind
from agentrl.rollout.demonstrations.call_ids import CallIds, with_ids
from agentrl.rollout.demonstrations.layouts import Demonstration, PlainText
from agentrl.rollout.demonstrations.left_out import refuse_left_out
from agentrl.rollout.demonstrations.read_back import refuse_misread, refuse_stops
from agentrl.rollout.tool_calls import ParsedCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_ADDED_THOUGHT = "thoughts that the chat template does not write are trained before the turn"


def demonstrated_tree(
    renderer: ChatRenderer,
    shown: Demonstration,
    remark: Callable[[str], None] = lambda sentence: None,
) -> TokenTree:
    """The tree of a conversation; its mask is 1 on what is trained.

    `remark` is called with sentences on what the user may not expect.

    Raises `ValueError`, with one sentence that continues after the row's place, if the chat
    template refuses the messages, leaves out what is said to the model, or writes one of the
    assistant's messages behind no prompt like its own, so that no mask of it is exact.
    """
    messages = shown.messages
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if turns[0] == 0:
        raise ValueError("message 1 is the assistant's: it answers nothing")
    last = max(at for at in turns if shown.trained[at])
    conversation = Conversation(renderer, messages[: turns[0]], shown.tools or None)
    refuse_left_out(conversation, 0)
    context = TokenContext()
    context.begin_segment(conversation.prompt_ids)
    call_ids = CallIds(renderer)
    for at, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        with _naming(at):
            output, adds_thought = _turn_ids(
                renderer, conversation, messages[at], shown.tools, call_ids
            )
        if adds_thought:
            remark(_ADDED_THOUGHT)
        span = VersionSpan(version=0, start=0, end=len(output))
        mask = {"mask": int(shown.trained[at]), "advantages": float(shown.trained[at])}
        context.add_turn(output, [0.0] * len(output), [span], mask)
        if at == last:
            return context.tree()
        added = []
        for number in range(at + 1, following):
            with _naming(number):
                added.append(call_ids.answered(messages[number]))
        onward = conversation.extend(output, added)
        refuse_left_out(conversation, at + 1)
        if onward.extends:
            context.observe(onward.ids, onward.n_separator)
        else:
            context.begin_segment(onward.ids, onward.drift)
    raise AssertionError("the last trained turn is one of the turns")


@contextmanager
def _naming(at: int) -> Iterator[None]:
    """Errors within name the message, counted from 1."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"message {at + 1}: {error}") from None


def _turn_ids(
    renderer: ChatRenderer,
    conversation: Conversation,
    message: Message,
    tools: Tools,
    call_ids: CallIds,
) -> tuple[list[int], bool]:
    """The ids that a model samples when it says `message`, with the token that ends the turn.

    The second value: whether they begin with a thought that the template does not write.
    Raises `ValueError` if no model can sample it, or if it would be read as something else.
    """
    said = _said(renderer, message)
    refuse_stops(renderer, said)
    *better, last = call_ids.choices(message)
    for ids in better:
        with suppress(ValueError):  # which the last ids raise too, unless it is about these
            written = _written(renderer, conversation, said, tools, ids)
            break
    else:
        ids, written = last, _written(renderer, conversation, said, tools, last)
    call_ids.take(message, ids)
    end = renderer.capabilities.turn_ends[0 if said.calls else -1][1]
    return [*renderer.encode_inside(written.text), end], written.adds_thought


def _written(
    renderer: ChatRenderer,
    conversation: Conversation,
    said: TurnReading,
    tools: Tools,
    ids: Sequence[str],
) -> WrittenTurn:
    """The turn, its calls with these ids."""
    prompt = conversation.prompt_text
    written = turn_behind(
        renderer,
        prompt,
        conversation.render_closed,
        said,
        answers=conversation.entries[-1].message["role"] != "assistant",
        put=lambda turn: with_ids(turn, said, ids),
    )
    if written.left_out:
        raise ValueError(f"the chat template leaves out {written.left_out[0][:60]!r}")
    refuse_misread(renderer, prompt, written.text, said, tools)
    return written


def _said(renderer: ChatRenderer, message: Message) -> TurnReading:
    """What a turn says. A thought in its content is one, if the template has a notation for it."""
    calls = [
        ParsedCall(call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    thought, content = message.get("reasoning_content", ""), message["content"]
    capabilities = renderer.capabilities
    begins = content.lstrip().startswith(capabilities.thought_marks.open)
    if begins and not thought and capabilities.writes_thoughts:
        thought, end = find_thought(content, capabilities.thought_marks)
        content = content[end:].lstrip("\n") if end else content
    return saying(thought, content, calls)


def plain_tree(tokenizer: "PreTrainedTokenizerBase", shown: PlainText) -> TokenTree:
    """Prompt and completion as the tokenizer has them, and the token that ends a text, once.

    Raises `ValueError` if there is nothing to train, or if the tokenizer has no such token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("cannot end: the tokenizer has no eos_token, which ends a text")
    prompt = list(tokenizer(shown.prompt)["input_ids"]) if shown.prompt else []
    said = list(tokenizer(shown.completion, add_special_tokens=not prompt)["input_ids"])
    if not said:
        raise ValueError("has an empty text to train")
    end = tokenizer.eos_token_id
    ids = [*prompt, *said] if said[-1] == end else [*prompt, *said, end]
    trained = [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    return TokenTree.line(ids, mask=trained, advantages=trained)
