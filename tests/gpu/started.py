"""A new process's first tokens: run by test_start.py with caches of its own. Prints, as JSON, how
many kernels were compiled when, how often it planned and rehearsed, and the tokens.
"""

import json

from distmega.engine import kept_plans, late
from distmega.hostir.run.evaluator import Evaluator
from distmega.kernels.hopper.one_row.runner import RowRunner
from distmega.kernels.runtime import warm_up
from distmega.kernels.runtime.compilations import num_compiled
from tests.gpu.engines import open_engine, random_model

NUM_TOKENS = 12
counts = {"rehearsals": 0, "plans": 0}


def watch() -> None:
    """Counts plans and rehearsals, and kernels compiled before something runs."""
    rehearse, plan = Evaluator.rehearse, late.plan_decode

    def rehearsed(self: Evaluator, tensors: dict[str, object]) -> None:
        counts["rehearsals"] += 1
        rehearse(self, tensors)  # type: ignore[arg-type]

    def planned(*given: object, **named: object) -> object:
        counts["plans"] += 1
        return plan(*given, **named)  # type: ignore[arg-type]

    Evaluator.rehearse = rehearsed  # type: ignore[assignment, method-assign]
    late.plan_decode = planned  # type: ignore[assignment]
    run = Evaluator.run

    def first_run(self: Evaluator, tensors: dict[str, object]) -> object:
        counts.setdefault("compiled before the first run", num_compiled())
        return run(self, tensors)  # type: ignore[arg-type]

    Evaluator.run = first_run  # type: ignore[assignment, method-assign]


def main() -> None:
    """Two prompts of one size and tokens after the first."""
    assert kept_plans.FOLDER is not None
    num_compiled()
    watch()
    engine = open_engine(random_model("qwen3-0.6b", num_layers=3))
    warm_up.finish()
    assert isinstance(engine.stepping, RowRunner)
    decode = engine.stepping._launchers[False]._preparing
    assert decode is not None
    decode.join()  # so that what is compiled from here on is the prompt's
    prompt = list(range(100, 228))
    tokens = [engine.prefill(prompt)]
    engine.stepping.start(tokens, [len(prompt)])
    tokens += engine.stepping.run_steps(NUM_TOKENS)[:, 0].tolist()
    counts["compiled in all"] = num_compiled()
    print(json.dumps({**counts, "tokens": tokens}))


if __name__ == "__main__":
    main()
