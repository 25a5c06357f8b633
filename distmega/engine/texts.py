"""Texts of requests as the tokens that an engine is given, and what tokens it takes.

In: a request, the model's configuration and tokenizer. Out: ids of tokens, or RequestError. Without
torch: what asks for ranks (generation.py) finds by these what is wrong before any starts; ranks
(ranks/jobs.py) encode by them, and engine.py and calls.py have their rules from here.
"""

from collections.abc import Sequence

from distmega.arguments import shown
from distmega.engine.decode_plan import context_limit, require_positions
from distmega.engine.requests import GenerateRequest, ScoreRequest
from distmega.errors import RequestError, argument, counted
from distmega.models.decoder import AnyDecoder
from distmega.models.text.tokenizer import Tokenizer


def encode_prompts(
    request: GenerateRequest, config: AnyDecoder, tokenizer: Tokenizer
) -> list[list[int]]:
    """Token ids of each prompt. RequestError for one that has none, that does not fit the context
    together with its answer, or with tokens that the model does not know.
    """
    prompts = []
    for prompt in request.prompts:
        if request.chat:
            text = tokenizer.chat_prompt([{"role": "user", "content": prompt}])
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(prompt)
        which = f" ({shown(prompt)})" if len(request.prompts) > 1 else ""
        require_not_empty(len(ids), f" of the text {shown(prompt)}")
        require_positions(config, request.options, request.max_new_tokens, len(ids), which)
        require_known(ids, config.vocab, f" of the text {shown(prompt)}")
        prompts.append(ids)
    return prompts


def encode_text(request: ScoreRequest, config: AnyDecoder, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text to score. RequestError where there is nothing to predict in it or in a
    context, and for tokens that the model does not know.
    """
    if (limit := context_limit(config, request.options)) < 2:
        raise RequestError(
            f"{argument('max_context')} {limit}",
            expected="at least 2, a token and the next one",
            remedy="raise it",
        )
    ids = tokenizer.encode(request.text)
    if len(ids) < 2:
        raise RequestError(
            f"a text of {counted(len(ids), 'token')}",
            expected="at least 2",
            remedy="give a longer text",
        )
    require_known(ids, config.vocab, " of the text")
    return ids


def require_not_empty(num_tokens: int, which: str) -> None:
    """RequestError for a prompt without tokens; which: says in a message which prompt it is."""
    if not num_tokens:
        raise RequestError(
            f"an empty prompt{which}",
            expected="a token at least",
            remedy="leave the prompt out, or begin it with the model's first token",
        )


def require_known(ids: Sequence[int], vocab: int, which: str = "") -> None:
    """RequestError for a token that is not one of 0 to vocab - 1; which: says in a message where
    it is given.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocab:
        wrong = next(token for token in ids if not 0 <= token < vocab)
        raise RequestError(
            f"token {shown(wrong)}{which}",
            expected=f"tokens of 0 to {vocab - 1}",
            remedy="use the model's own tokenizer",
        )
