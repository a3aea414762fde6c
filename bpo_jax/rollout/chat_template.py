"""A chat template as text: what it puts around messages, found out by rendering conversations.

Templates render a whole conversation at a time; a policy that acts needs to know what to append.
Of the template it was asked to follow, this module therefore wants that a conversation grows at its
end alone. What families of models do is covered:

- A system message of their own where there is none (Qwen2.5, SmolLM2), or one that tells the date
  (Llama 3): part of the prompt. The date is pinned, or a run would not be the same a day later.
- White space around messages is stripped (Llama 3): so it is here.
- Thoughts are taken out of earlier turns, and the text that opens a turn is not the one that stands
  before an earlier turn: it may hold an empty thought (Qwen3 without thinking) or the beginning of
  one (DeepSeek-R1). What the policy read and said stays in its context as it was.
- The turn is opened whether or not that was asked for, or never: it is opened once.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import transformers

Message = Mapping[str, Any]

DATE = datetime.date(2024, 7, 26)
"""What templates that tell the date are told; Llama 3's own value where it knows no clock."""

_CLOCK = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1""")
# Stands in front of a template, and hides the real clock.
_PINNED_CLOCK = "{%- macro strftime_now(format) -%}{{- pinned_dates[format] -}}{%- endmacro -%}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """What stands around the messages that follow the prompt.

    Attributes:
      stop: the special token that ends a turn.
      before: from the end of a turn to the text of the user's message.
      after: from there to the text of the next turn.
      strips: white space around a user's message is left out.
    """

    stop: str
    before: str
    after: str
    strips: bool


class ChatTemplate:
    """Renders conversations, and knows how they grow.

    Args:
      tokenizer: has the template.
      thinking: what templates that can switch thoughts on and off are told (``enable_thinking``);
        None for their own default.
      date: what templates that tell the date are told.

    Attributes:
      frame: what stands around messages.
      opens_thought: the text that opens a turn ends inside a thought.

    Raises:
      ValueError: the template rewrites earlier messages, or does not end turns with a special
        token, so that ids could not be appended.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        thinking: bool | None = None,
        date: datetime.date = DATE,
    ):
        self._tokenizer = tokenizer
        self._source: str = tokenizer.get_chat_template()
        formats = {format for _, format in _CLOCK.findall(self._source)}
        self._options: dict[str, Any] = {"date_string": date.strftime("%d %b %Y")}
        if formats:
            self._source = _PINNED_CLOCK + self._source
            self._options["pinned_dates"] = {format: date.strftime(format) for format in formats}
        if thinking is not None:
            self._options["enable_thinking"] = thinking
        self._find_opening()
        self.frame = self._find_frame()
        self.opens_thought = self.frame.after.rstrip().endswith("<think>")

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, with the opening of the policy's next turn."""
        return self._render(messages) + ("" if self._opens else self._opening)

    def pieces(self, messages: Sequence[Message]) -> list[str]:
        """What the policy reads before each of its turns, the next one included.

        This is the template's view of the whole conversation with the turns cut out, whatever it
        would do to them. From the second piece on, each begins with the stop token of the turn
        before it.

        Raises:
          ValueError: the template leaves a turn out, or puts something else before it.
        """
        marks = iter(_marks(len(messages), messages))
        marked = [
            {"role": "assistant", "content": next(marks)} if m["role"] == "assistant" else m
            for m in messages
        ]
        pieces, rest = [], self.render(marked)
        for message in (m for m in marked if m["role"] == "assistant"):
            before, found, rest = rest.partition(message["content"])
            if not found or not before.endswith(self._earlier):
                raise ValueError(f"the chat template rewrites earlier turns of\n{messages!r}")
            pieces.append(before.removesuffix(self._earlier) + self._opening)
        return [*pieces, rest]

    def after_turn(self, message: str) -> str:
        """What the policy reads from the end of a turn to its next one, given the user's message.

        Unlike `Frame` this asks the template, which may treat some messages in ways of its own.
        """
        _, piece = self.pieces([*_talk(2), {"role": "user", "content": message}])
        return piece.removeprefix(self.frame.stop)

    def split(self, messages: Sequence[Message]) -> tuple[list[str], list[str]]:
        """The rendered conversation, taken apart into what is around the messages and their texts.

        Returns:
          One more text around them than messages, and the messages as the template shows them.

        Raises:
          ValueError: the template does more to a message than to strip white space.
        """
        marks = _marks(len(messages))
        marked = [dict(m, content=mark) for m, mark in zip(messages, marks, strict=True)]
        around, rest = [], self.render(marked)
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                raise ValueError(f"the chat template leaves a message out of\n{messages!r}")
            around.append(before)
        around.append(rest)
        rendered = self.render(messages)
        shown, rest = [], rendered.removeprefix(around[0])
        for message, after in zip(messages, around[1:], strict=True):
            text = message["content"]
            if not rest.startswith(text + after):
                text = text.strip()
            shown.append(text)
            rest = rest.removeprefix(text + after)
        if rendered != "".join(a + s for a, s in zip(around, [*shown, ""], strict=True)):
            raise ValueError(
                "the chat template changes the text of messages: it renders\n"
                f"{rendered!r}\nfor\n{[m['content'] for m in messages]!r}"
            )
        return around, shown

    def _render(self, messages: Sequence[Message], *, opened: bool = True) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._source,
                tokenize=False,
                add_generation_prompt=opened,
                **self._options,
            )
        except Exception as error:  # of Jinja, or what the template does
            roles = ", ".join(m["role"] for m in messages)
            raise ValueError(
                f"the chat template refuses messages by {roles} ({type(error).__name__}: "
                f"{' '.join(str(error).split())})"
            ) from error

    def _find_opening(self) -> None:
        """Finds what opens the policy's turn, and what stands there once it is an earlier one."""
        talk = _talk(3)
        closed = self._render(talk[:1], opened=False)
        opened, longer = self._render(talk[:1]), self._render(talk)
        history, found, _ = longer.partition(talk[1]["content"])
        # Some end a conversation that is not to go on with a token of its own.
        common = _common_start(_common_start(closed, opened), history)
        if not found or talk[0]["content"] not in common:
            raise _rewrites(opened, longer)
        self._earlier = history[len(common) :]
        # Where asking for it changes nothing, the turn is either open always, or never.
        self._opens = not (opened == closed == common and self._earlier)
        self._opening = opened[len(common) :] if self._opens else self._earlier

    def _find_frame(self) -> Frame:
        """Finds what stands around messages, and whether it always does."""
        talk = _talk(5)
        said, heard, again, last = (m["content"] for m in talk[1:])
        longer = self.render(talk[:3])
        end, found, after = longer.partition(said)[2].partition(heard)
        if not found or not after.endswith(self._opening):
            raise _rewrites(self.render(talk[:1]), longer)
        earlier = after.removesuffix(self._opening) + self._earlier
        expected = longer + again + end + last + after
        expected = expected.replace(heard + after, heard + earlier, 1)
        longest = self.render(talk)
        if longest != expected:
            raise _rewrites(longer, longest)
        special = sorted(self._tokenizer.get_added_vocab(), key=len, reverse=True)
        stop = next((s for s in special if end.startswith(s)), None)
        if stop is None:
            raise ValueError(
                f"the chat template ends a turn with {end!r}, which begins with no special token, "
                "so that nothing would end a sampled turn"
            )
        padded = f" \n{heard}\n "
        shown = self.render([*talk[:2], dict(talk[2], content=padded)])
        for strips, text in ((False, padded), (True, heard)):
            if shown == longer.replace(heard, text):
                return Frame(stop=stop, before=end[len(stop) :], after=after, strips=strips)
        raise ValueError(
            "the chat template changes the text of messages, so token ids cannot be appended; it "
            f"renders\n{shown!r}\nwhere {padded!r} was said"
        )


def _common_start(a: str, b: str) -> str:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return a[:count]


def _rewrites(shorter: str, longer: str) -> ValueError:
    return ValueError(
        "this chat template rewrites earlier messages, so token ids cannot be appended; it renders"
        f"\n{longer!r}\nafter\n{shorter!r}"
    )


def _talk(count: int) -> list[dict[str, str]]:
    """A conversation of placeholders in which user and assistant take turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": mark} for i, mark in enumerate(_marks(count))]


def _marks(count: int, messages: Sequence[Message] = ()) -> list[str]:
    """Texts that neither a template nor one of the messages holds, none of them within another."""
    word = "message"
    while any(word in m["content"] for m in messages):
        word += "e"
    return [f"({word} {number})" for number in range(count)]
