"""Between messages and token ids: the chat template, applied so that ids are only ever appended.

Tokens the policy sampled are kept as they were sampled. What the template puts around them (the end
of the turn, the next user message, the opening of the next turn) is found once, by rendering
conversations of placeholders and looking at what stands between them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import transformers

_USER, _REPLY, _NEXT = "placeholderone", "placeholdertwo", "placeholderthree"


class Dialogue:
    """The token ids of a conversation between the policy (assistant) and a sandbox (user).

    Args:
      tokenizer: a fast tokenizer with a chat template.

    Raises:
      ValueError: the template changes or moves the text of messages, or does not end the
        assistant's turns with a special token, so that ids could not be appended.
    """

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        # Encoding changes a fast tokenizer's settings, and engines run in threads.
        self._lock = threading.Lock()
        self._special = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        start = [{"role": "user", "content": _USER}]
        opened = self.render(start)
        longer = self.render(
            [
                *start,
                {"role": "assistant", "content": _REPLY},
                {"role": "user", "content": _NEXT},
            ]
        )
        before, found, after = longer.partition(_NEXT)
        if not found or not before.startswith(opened + _REPLY):
            raise ValueError(
                "this chat template rewrites earlier messages, so token ids cannot be appended; "
                f"it renders\n{longer!r}\nafter\n{opened!r}"
            )
        end = before[len(opened + _REPLY) :]
        stop = next((s for s in self._special if end.startswith(s)), None)
        if stop is None:
            raise ValueError(f"the template ends a turn with {end!r}, which is no special token")
        self.stop_token = stop
        self.stop_id: int = tokenizer.convert_tokens_to_ids(stop)
        self._before, self._after = end[len(stop) :], after

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as text, with the opening of the policy's next turn."""
        return self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """int32 ids of the messages and of the opening of the policy's turn.

        The text of special tokens inside a message stays text, as in `observation_ids`.
        """
        if not any(self._holds_special(m["content"]) for m in messages):
            return self._encode(self.render(messages))
        rest, ids = self.render(messages), []
        for message in messages:
            before, found, rest = rest.partition(message["content"])
            if not found:
                raise ValueError(f"the chat template changes the message {message['content']!r}")
            ids += [self._encode(before), self._encode(message["content"], plain=True)]
        return np.concatenate([*ids, self._encode(rest)])

    def observation_ids(self, observation: str, *, stopped: bool) -> np.ndarray:
        """int32 ids that follow a sampled turn: the observation and the next turn's opening.

        Args:
          observation: the user message. The text of special tokens inside it stays text.
          stopped: the turn ended with the stop token; where it did not, the token is put in front,
            as context and not as an action.
        """
        if self._holds_special(observation):
            parts = [
                self._encode(self._before),
                self._encode(observation, plain=True),
                self._encode(self._after),
            ]
        else:
            parts = [self._encode(self._before + observation + self._after)]
        forced = [] if stopped else [np.array([self.stop_id], np.int32)]
        return np.concatenate([*forced, *parts])

    def turn_ids(self, text: str) -> np.ndarray:
        """int32 ids of a turn that somebody else wrote, its stop token included."""
        return np.append(self._encode(text, plain=True), np.int32(self.stop_id))

    def text(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of a sampled turn, without its stop token."""
        ids = [int(i) for i in token_ids]
        if ids and ids[-1] == self.stop_id:
            ids.pop()
        with self._lock:
            return self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )

    def _holds_special(self, text: str) -> bool:
        return any(s in text for s in self._special)

    def _encode(self, text: str, *, plain: bool = False) -> np.ndarray:
        with self._lock:
            ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain)
        return np.array(ids, np.int32)
