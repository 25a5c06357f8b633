"""A model from Python: a prompt answered in one call, and an engine on each rank of which a program
of your own takes what it wants.

    python examples/generate.py [MODEL]

Under torchrun, whose processes are the ranks and each run all of this, it starts none of its own:
torchrun --standalone --nproc-per-node 2 examples/generate.py
"""

import sys

import distmega
from distmega.launch import LauncherOptions, Result, is_under_torchrun, launch

PROMPT = "The capital of France is"


def next_tokens(context: distmega.RankContext, model: str, emit: distmega.Emit) -> list[str]:
    """What each rank does: opens its part of the model, and makes the same calls as the others.
    Gives the five tokens that are most likely to follow the prompt.
    """
    source = distmega.open_model(model)
    tokenizer = source.tokenizer()
    options = distmega.EngineOptions(max_context=64)
    engine = distmega.open_engine(context, source, context.world_size, options)
    logits = engine.logits(tokenizer.encode(PROMPT))[-1]
    return [tokenizer.decode([int(token)]) for token in logits.topk(5).indices]


def answer(model: str) -> None:
    """One rank, started and ended for it, continues the prompt."""
    request = distmega.GenerateRequest(model=model, prompts=(PROMPT,), max_new_tokens=8)
    result = distmega.generate(request, LauncherOptions(device="cpu"))
    print(PROMPT + result.answers[0].text)


def main(model: str = "smollm2-135m-instruct") -> None:
    """Answers on one rank, then looks at the logits on two, all on this machine's CPUs."""
    if not is_under_torchrun():
        answer(model)
    for event in launch(next_tokens, model, LauncherOptions(num_ranks=2, device="cpu")):
        if isinstance(event, Result):
            print("most likely to follow:", event.value)


if __name__ == "__main__":
    main(*sys.argv[1:])
