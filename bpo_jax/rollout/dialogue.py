"""Between messages and token ids: the chat template, applied so that ids are only ever appended.

Tokens the policy sampled are kept as they were sampled, whatever the template would make of their
text later on. What is put around them is text of the template (`chat_template`), and what was put
there is compared with it: ids whose text is another are refused.

- A turn ends with any of the `stop_ids`. It keeps the one it ended with, also where that is not the
  template's (Llama's end of a tool call, the end of a document), and the conversation goes on as
  after the template's; a turn cut at its limit is given that one, as context.
- An observation is the next message of the user, whatever the format of actions. The text of
  special tokens in it stays text, and characters that no UTF-8 has (halves of surrogate pairs)
  become U+FFFD.
- Where an observation is too long, it is left to the caller to end the trajectory, or its middle is
  left out.
"""

from __future__ import annotations

import datetime
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from bpo_jax.rollout import chat_template
from bpo_jax.rollout.chat_template import Message
from bpo_jax.tree import Tree

if TYPE_CHECKING:
    import transformers

Overflow = Literal["end", "clip"]
"""What happens to an observation that does not fit; see `Dialogue`."""

LEAST_OBSERVATION = 64
"""Tokens that a clipped observation may have, at least."""
_LEAST_SHOWN = 16
"""Of those, tokens of the observation; where there is room for fewer, it is not clipped."""


class Dialogue:
    """The token ids of a conversation between the policy (assistant) and a sandbox (user).

    Args:
      tokenizer: a fast tokenizer with a chat template.
      stop_ids: tokens that end a turn beside the template's and the tokenizer's ``eos_token``, such
        as those of a model's ``generation_config.json``.
      thinking: for templates that can switch thoughts on and off; None for their own default.
      date: for templates that tell the date.
      overflow: "end" leaves observations as they are; "clip" leaves out the middle of one that is
        longer than `observation_tokens` or than the room there is.
      observation_tokens: most tokens of an observation under "clip"; None for no limit.

    Attributes:
      stop_token, stop_id: what the template ends a turn with.
      stop_ids: all that end a turn, in ascending order.

    Raises:
      ValueError: token ids cannot be appended with this template or this tokenizer.
    """

    def __init__(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int] = (),
        thinking: bool | None = None,
        date: datetime.date = chat_template.DATE,
        overflow: Overflow = "end",
        observation_tokens: int | None = None,
    ):
        self.tokenizer = tokenizer
        self.template = chat_template.ChatTemplate(tokenizer, thinking=thinking, date=date)
        if observation_tokens is not None and observation_tokens < LEAST_OBSERVATION:
            raise ValueError(
                f"observation_tokens={observation_tokens}: expected {LEAST_OBSERVATION} or more, "
                "or None"
            )
        self.overflow = overflow
        self.observation_tokens = observation_tokens
        # Encoding changes a fast tokenizer's settings, and engines run in threads.
        self._lock = threading.Lock()
        special = [re.escape(str(t)) for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = re.compile(
            f"({'|'.join(sorted(special, key=len, reverse=True)) or '(?!)'})"
        )
        self._normalizer = tokenizer.backend_tokenizer.normalizer
        self.stop_token = self.template.frame.stop
        self.stop_id: int = tokenizer.convert_tokens_to_ids(self.stop_token)
        own = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        self.stop_ids = tuple(sorted({self.stop_id, *own, *stop_ids}))

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, with the opening of the policy's next turn."""
        return self.template.render(messages)

    # From text to ids.

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 ids of the messages and of the opening of the policy's turn.

        Raises:
          ValueError: the template or the tokenizer changes the text of the messages.
        """
        messages = [dict(m, content=_readable(m["content"])) for m in messages]
        around, shown = self.template.split(messages)
        return self._ids(around, shown)

    def observation_ids(
        self, observation: str, *, stopped: bool, room: int | None = None
    ) -> np.ndarray:
        """int32 ids that follow a sampled turn: the observation and the next turn's opening.

        Args:
          observation: the user's message.
          stopped: the turn ended with one of the `stop_ids`; where it did not, the template's is
            put in front, as context and not as an action.
          room: most ids to return under "clip". An observation of which nothing sensible could be
            shown in it is not clipped: the ids are more than there is room for, and the trajectory
            cannot go on.

        Raises:
          ValueError: the template or the tokenizer changes the text of the observation.
        """
        frame = self.template.frame
        shown = self.shown(observation, stopped=stopped, room=room)
        ids = self._ids([frame.before, frame.after], [shown])
        rendered = self.template.after_turn(shown)
        if rendered != frame.before + shown + frame.after:
            raise ValueError(
                f"the chat template treats this observation otherwise than others: it renders\n"
                f"{rendered!r}\nwith\n{shown!r}\nbetween {frame.before!r} and {frame.after!r}"
            )
        return ids if stopped else np.append(np.int32(self.stop_id), ids)

    def shown(self, observation: str, *, stopped: bool, room: int | None = None) -> str:
        """The text of the observation in `observation_ids`, all of it or without its middle.

        Where the middle is left out, a line says how many tokens of the observation it had. The
        cuts lie between tokens and between characters.
        """
        frame = self.template.frame
        text = self._shown_whole(observation)
        around, forced = [frame.before, frame.after], int(not stopped)

        def excess(text: str) -> int:
            over = [0]
            if room is not None:
                over.append(len(self._ids(around, [text])) + forced - room)
            if self.observation_tokens is not None:
                over.append(len(self._encode(text, plain=True)) - self.observation_tokens)
            return max(over)

        return text if self.overflow == "end" else self._clipped(text, excess)

    def turn_ids(self, text: str) -> np.ndarray:
        """int32 ids of a turn that somebody else wrote, its stop token included.

        Where the opening of a turn begins the thought (DeepSeek-R1), the turn begins inside it.
        """
        if self.template.opens_thought:
            begun = text.removeprefix("<think>")
            text = begun if begun != text else f"\n</think>\n\n{text}"
        return np.append(self._encode(_readable(text), plain=True), np.int32(self.stop_id))

    # From ids to text.

    def text(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of a sampled turn, without the token that stopped it."""
        ids = [int(i) for i in token_ids]
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._decode(ids)

    def check(self, messages: Sequence[Message], ids: Sequence[int] | np.ndarray) -> None:
        """Compares a conversation under way with the template's rendering of the whole of it.

        What was read must be the template's, id by id, however long ago it was appended; what was
        said must have the text of its message.

        Args:
          messages: of the conversation, the last one not the policy's; observations as `shown`.
          ids: all of its ids, up to the opening of the policy's next turn.

        Raises:
          ValueError: they differ; says where.
        """
        messages = [dict(m, content=_readable(m["content"])) for m in messages]
        rest = [int(i) for i in ids]
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        later = messages[first:]
        if [m["role"] for m in later] != ["assistant", "user"] * (len(later) // 2):
            raise ValueError("expected assistant and user in turn after the prompt")
        frame = self.template.frame
        pieces = self.template.pieces(messages)
        prompt = self.prompt_ids(messages[:first])
        self._compare("the prompt", pieces[0], prompt, rest[: len(prompt)])
        rest = rest[len(prompt) :]
        for turn, piece in enumerate(pieces[1:]):
            said, heard = later[2 * turn]["content"], later[2 * turn + 1]["content"]
            stop = next((i for i, token in enumerate(rest) if token in self.stop_ids), len(rest))
            if self._decode(rest[:stop]) != said:
                raise ValueError(
                    f"turn {turn}: the ids say {self._decode(rest[:stop])!r}, the message {said!r}"
                )
            heard = self._shown_whole(heard)
            read = self._ids([frame.before, frame.after], [heard])
            rest = rest[stop + 1 :]
            where = f"what follows turn {turn}"
            self._compare(where, piece.removeprefix(frame.stop), read, rest[: len(read)])
            rest = rest[len(read) :]
        if rest:
            raise ValueError(f"more ids than messages: {self._decode(rest)!r}")

    def check_tree(self, tree: Tree, prompt: Sequence[Message]) -> None:
        """Checks the conversations of all trajectories of a tree, up to the last observation.

        Args:
          tree: grown with this dialogue, its observations as `shown`.
          prompt: the messages its root has read.

        Raises:
          ValueError: one of them is not what the template renders.
        """
        for path in tree.paths():
            messages, ids = list(prompt), tree.root.context_ids
            said = np.zeros(0, np.int32)
            for action in path:
                said = np.append(said, action.token_ids)
                after = action.next
                if after is None or after.fresh:
                    break
                if not after.mid_turn:
                    messages += [
                        {"role": "assistant", "content": self.text(said)},
                        {"role": "user", "content": self.shown(after.observation, stopped=True)},
                    ]
                    ids = np.concatenate([ids, said, after.context_ids])
                    said = said[:0]
            self.check(messages, ids)

    def _compare(self, where: str, text: str, expected: np.ndarray, ids: list[int]) -> None:
        """Raises unless `ids` are `expected` and those say `text`."""
        says = self._decode(ids)
        if self._normal(says) != self._normal(text):
            raise ValueError(f"{where}: the ids say\n{says!r}\nthe chat template\n{text!r}")
        if ids != expected.tolist():
            raise ValueError(f"{where}: the ids are {ids}, expected {expected.tolist()}")

    def _shown_whole(self, observation: str) -> str:
        text = _readable(observation)
        return text.strip() if self.template.frame.strips else text

    def _clipped(self, text: str, excess: Callable[[str], int]) -> str:
        """The text without so much of its middle that `excess` counts no token too many.

        The whole text where hardly any of it would be left.
        """
        over = excess(text)
        if not over:
            return text
        ids = self._encode(text, plain=True).tolist()
        whole = self._decode(ids)
        keep = len(ids) - over
        while keep >= _LEAST_SHOWN:
            head, tail = ids[: keep - keep // 2], ids[-(keep // 2) :]
            # A character may have several tokens.
            while not whole.startswith(self._decode(head)):
                head.pop()
            while not whole.endswith(self._decode(tail)):
                del tail[0]
            left_out = len(ids) - len(head) - len(tail)
            note = f"\n[... {left_out} tokens left out ...]\n"
            clipped = self._decode(head) + note + self._decode(tail)
            over = excess(clipped)
            if not over:
                return clipped
            keep -= over
        return text

    # Tokens.

    def _ids(self, around: Sequence[str], shown: Sequence[str]) -> np.ndarray:
        """Ids of texts of the template with texts of messages between them, compared with both.

        Special tokens are read in the template's texts alone.
        """
        texts = list(zip(around, [*shown, ""], strict=True))
        whole = "".join(template + message for template, message in texts)
        if not any(self._special.search(message) for message in shown):
            ids = self._encode(whole)
        else:
            parts = [""]  # every second one a special token
            for template, message in texts:
                plain, *more = self._special.split(template)
                parts[-1] += plain
                parts += more
                parts[-1] += message
            ids = np.concatenate(
                [self._encode(part, plain=i % 2 == 0) for i, part in enumerate(parts)]
            )
        says = self._decode(ids)
        if self._normal(says) != self._normal(whole):
            raise ValueError(f"the tokenizer changes text: it says\n{says!r}\nfor\n{whole!r}")
        return ids

    def _encode(self, text: str, *, plain: bool = False) -> np.ndarray:
        with self._lock:
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain)
        return np.array(ids, np.int32)

    def _decode(self, ids: Sequence[int] | np.ndarray) -> str:
        with self._lock:
            return self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )

    def _normal(self, text: str) -> str:
        """The text as the tokenizer reads it; Qwen's composes characters."""
        return self._normalizer.normalize_str(text) if self._normalizer else text


_SURROGATE = re.compile("[\ud800-\udfff]")


def _readable(text: str) -> str:
    """The text with what no UTF-8 can hold replaced; leniently decoded output may have it."""
    return _SURROGATE.sub("\ufffd", text)
