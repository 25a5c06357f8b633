"""Answers that grow a token at a time: what of their text can be given out, and when they end.

In: the tokens that continue a prompt. Out: pieces of text, and in the end an Answer. Text that may
turn out to begin with a stop text is held back until what follows it is known. Used by jobs.py;
needs neither torch nor a model.
"""

from collections.abc import Collection, Sequence

from distmega.engine.requests import Answer, FinishReason, Logprob
from distmega.models.text.tokenizer import Tokenizer


class GrowingAnswer:
    """The tokens that continue a prompt so far. finish_reason: why it has ended, once it has."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        eos_ids: Collection[int] = (),
        stop: Sequence[str] = (),
    ) -> None:
        """eos_ids: tokens that end it. stop: texts that end it, and are no part of it; those of
        special tokens, which no text has, end it as tokens.
        """
        self.finish_reason: FinishReason | None = None
        self._stream, self._eos_ids = tokenizer.stream(prompt), eos_ids
        self._stop, self._held, self._is_cut = tuple(stop), "", False
        self._stop_ids = {tokenizer.special_id(text) for text in stop} - {None}
        self._ids, self._text, self._num_prompt_tokens = list[int](), "", len(prompt)
        self._logprobs = list[Logprob]()

    def push(self, token: int, logprob: Logprob | None = None) -> str:
        """Adds a token; the text that can be given out with it."""
        assert self.finish_reason is None, "an answer that has ended"
        self._ids.append(token)
        self._logprobs += [logprob] if logprob else []
        if token in self._eos_ids:
            self.finish_reason = "eos"
            return ""
        if token in self._stop_ids:
            self.finish_reason = "stop"
            return ""
        return self._give_out(self._stream.push(token))

    def finish(self) -> Answer:
        """The whole answer."""
        tail = ""
        if not self._is_cut:
            tail = self._give_out(self._stream.finish())
            tail += self._held
            self._text += self._held
        return Answer(
            ids=tuple(self._ids),
            text=self._text,
            tail=tail,
            num_prompt_tokens=self._num_prompt_tokens,
            finish_reason=self.finish_reason or "length",
            logprobs=tuple(self._logprobs),
        )

    def _give_out(self, piece: str) -> str:
        """Of what is held and this piece: all before the stop text that is complete first, however
        many characters come with a token, or before what may be one.
        """
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.finish_reason, self._held, self._is_cut = "stop", "", True
            _, start = min(found)
            given = text[:start]
        else:
            given = text[: len(text) - num_pending(text, self._stop)]
            self._held = text[len(given) :]
        self._text += given
        return given


def num_pending(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that a stop text may begin with."""
    longest = max(map(len, stops), default=1) - 1
    for num in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-num:]) for stop in stops):
            return num
    return 0
