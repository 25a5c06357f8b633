"""From a program to proven rules: search, then proofs of the fastest candidates.

Comes in: a Program, DeviceRates, SearchLimits. Goes out: rules, the fastest first, and what happens
meanwhile. It may be left at any time: what was proven until then stays. Once the limits' seconds
are over it proves no more than one rule. Next: rules.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from distmega.errors import ProgramError, VerifyError
from distmega.program.types import Program
from distmega.sharding.search.cost import DeviceRates
from distmega.superopt.graph.axes import used_part
from distmega.superopt.graph.cost import graph_us, program_us
from distmega.superopt.graph.text import print_graph
from distmega.superopt.graph.ugraph import UGraph
from distmega.superopt.proof.equivalence import is_as_good, prove
from distmega.superopt.rewrite import graph_program
from distmega.superopt.rules import RewriteRule
from distmega.superopt.search.schedule import SearchLimits
from distmega.superopt.search.search import Candidate, Progress, Search

MORE_OPS = 2
"""How many more ops than the limits say graphs may have where all of those are refused: a softmax
without its maximum has fewer ops than one that does not overflow.
"""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate that was not proven, and why."""

    candidate: Candidate
    reason: str


@dataclass(slots=True)
class Optimizer:
    """One run. program: what its outputs need of the one given. rules: what was proven, the fastest
    first. refused: what was not.
    """

    program: Program
    machine: DeviceRates
    limits: SearchLimits = field(default_factory=SearchLimits)
    seed: int = 0
    rules: list[RewriteRule] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    search: Search = field(init=False)

    def __post_init__(self) -> None:
        self.program = used_part(self.program)
        self.search = Search(self.program, self.machine, self.limits)

    def run(self) -> Iterator[Progress | RewriteRule | Refusal]:
        """Searches, then proves; with one op more where nothing that was found is proven."""
        yield from self.search.run()
        yield from self.prove_found()
        for more in range(1, MORE_OPS + 1) if self.refused else ():
            if self.rules or self.search.budget.is_over():
                return
            limits = replace(self.limits, slack=self.limits.slack + more)
            self.search = Search(self.program, self.machine, limits, budget=self.search.budget)
            yield from self.search.run()
            yield from self.prove_found()

    def prove_found(self) -> Iterator[RewriteRule | Refusal]:
        """Proves what the search has found until now; once each. Where the fastest are all refused
        the next ones follow, until some of them are proven. Without time one proof is enough, and
        the fastest are all that are tried.
        """
        first = 0
        while candidates := self.search.candidates(first):
            yield from self._prove(candidates)
            if self.rules or self.search.budget.is_over():
                return
            first += len(candidates)

    def _prove(self, candidates: Sequence[Candidate]) -> Iterator[RewriteRule | Refusal]:
        done = {rule.graph for rule in self.rules}
        done |= {print_graph(refusal.candidate.graph) for refusal in self.refused}
        for candidate in candidates:
            if print_graph(candidate.graph) in done:
                continue
            if self.rules and self.search.budget.is_over():
                return
            try:
                rule = self._rule(candidate)
            except VerifyError as error:
                self.refused.append(Refusal(candidate, str(error)))
                yield self.refused[-1]
            else:
                self.rules.append(rule)
                yield rule

    def _rule(self, candidate: Candidate) -> RewriteRule:
        proof = prove(self.program, candidate.graph, self.seed)
        return RewriteRule(
            name=f"{self.program.name}.{len(self.rules)}",
            program=self.program,
            graph=print_graph(candidate.graph),
            proof=proof,
            as_ops=self._is_good_in_ops(candidate),
            machine=self.machine.name,
            program_us=program_us(self.program, self.machine),
            graph_us=candidate.time_us,
        )

    def _is_good_in_ops(self, candidate: Candidate) -> bool:
        return _is_good_in_ops(self.program, candidate.graph, self.seed)


def _is_good_in_ops(program: Program, graph: UGraph, seed: int) -> bool:
    try:
        graph_program(graph)
    except ProgramError:
        return False
    return is_as_good(program, graph, graph_program, seed)


def divided_rule(
    rule: RewriteRule, graph: UGraph, launches: Sequence[tuple[int, int, int]], machine: DeviceRates
) -> RewriteRule:
    """The rule with its graph divided otherwise (regrid.py), as was measured on `machine` with
    these launches; proven once more. VerifyError where it isn't.
    """
    seed = rule.proof.seed
    return replace(
        rule,
        graph=print_graph(graph),
        proof=prove(rule.program, graph, seed),
        as_ops=_is_good_in_ops(rule.program, graph, seed),
        machine=machine.name,
        program_us=program_us(rule.program, machine),
        graph_us=round(graph_us(graph, machine), 6),
        launches=tuple(launches),
    )
