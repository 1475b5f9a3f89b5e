"""A demonstration as the token tree of a rollout that said the same.

The prompt is rendered, the demonstrated turn is written as the chat template writes it behind such
a prompt, and the conversation goes on from there as in sampling (`rollout.chat.conversation`). The
mask is 1 on the turn's tokens and on the token that ends it: no more is sampled, and no less.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from agentrl.databases.token_tree import TokenTree, common_prefix
from agentrl.policy_version import VersionSpan
from agentrl.rollout.chat import ChatRenderer, Conversation, Message
from agentrl.rollout.chat.capabilities import Tools
from agentrl.rollout.chat.tokens import TokenContext
from agentrl.rollout.chat.turns import TurnReading, find_thought
from agentrl.rollout.chat.written import WrittenTurn, saying, turn_behind
from agentrl.rollout.demonstrations.call_ids import CallIds, with_ids
from agentrl.rollout.demonstrations.layouts import Demonstration, PlainText
from agentrl.rollout.demonstrations.left_out import refuse_left_out
from agentrl.rollout.demonstrations.messages import naming
from agentrl.rollout.demonstrations.read_back import refuse_misread, refuse_stops
from agentrl.rollout.tool_calls import ParsedCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_ADDED_THOUGHT = "thoughts that the chat template does not write are trained before the turn"
_JOINED = "the end of the prompt joins the text behind it in one token, and is trained with it"


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
        with naming(at + 1):
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
        added = call_ids.answered(messages[at + 1 : following], first=at + 2)
        onward = conversation.extend(output, added)
        refuse_left_out(conversation, at + 1)
        if onward.extends:
            context.observe(onward.ids, onward.n_separator)
        else:
            context.begin_segment(onward.ids, onward.drift)
    raise AssertionError("the last trained turn is one of the turns")


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
    """What a turn says. A thought in its content is one, if the template has a notation for it.

    Raises `ValueError` if a field has another thought.
    """
    calls = [
        ParsedCall(call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    thought, content = message.get("reasoning_content", ""), message["content"]
    capabilities = renderer.capabilities
    begins = content.lstrip().startswith(capabilities.thought_marks.open)
    if begins and capabilities.writes_thoughts:
        inline, end = find_thought(content, capabilities.thought_marks)
        if thought and inline and inline != thought.strip():
            raise ValueError("has a thought in its content, and another one in a field")
        thought = thought or inline
        content = content[end:].lstrip("\n") if end else content
    return saying(thought, content, calls)


def plain_trees(
    tokenizer: "PreTrainedTokenizerBase",
    answers: Sequence[PlainText],
    remark: Callable[[str], None] = lambda sentence: None,
) -> list[TokenTree]:
    """Texts behind one prompt as the tokenizer has them, with the token that ends a text, once.

    As in TRL, each is encoded with its prompt as one text, and the completion begins where the
    prompt by itself has other tokens: encoded alone it could begin with a space that no text has.

    Raises `ValueError` if there is nothing to train, or if the tokenizer has no such token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("cannot end: the tokenizer has no eos_token, which ends a text")
    prompt = list(tokenizer(answers[0].prompt)["input_ids"]) if answers[0].prompt else []
    texts = [list(tokenizer(shown.prompt + shown.completion)["input_ids"]) for shown in answers]
    n_silent = min(common_prefix(np.array(prompt), np.array(ids)) for ids in texts)
    if not all(
        shown.completion and ids[n_silent:] for shown, ids in zip(answers, texts, strict=True)
    ):
        raise ValueError("has an empty text to train")
    if n_silent < len(prompt) and prompt[n_silent:] != [end]:
        remark(_JOINED)
    return [_plain_tree(ids if ids[-1] == end else [*ids, end], n_silent) for ids in texts]


def _plain_tree(ids: list[int], n_silent: int) -> TokenTree:
    trained = [0] * n_silent + [1] * (len(ids) - n_silent)
    return TokenTree.line(ids, mask=trained, advantages=trained)
