"""Nothing in kernels/ knows what a decoder is: no name says what an op is for in a model, and no
rule compares an expression with a constant one.

Names are those of functions, classes, arguments, variables, attributes and files, and strings that
are names, as fields and kinds are. Attention may speak of query and kv heads.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.repo.source import ROOT, parsed
from tests.repo.test_words import parts

INSTEAD = {
    **dict.fromkeys(("vocab", "vocabulary"), "num_logits, table_rows, columns"),
    "hidden": "columns, entry_columns",
    **dict.fromkeys(("token", "tokens"), "id, ids, rows"),
    **dict.fromkeys(("decode", "decodes", "decoder", "decoders", "decoding"), "steps, rows"),
    **dict.fromkeys(("prefill", "prefills", "prompt", "prompts"), "rows, packed rows"),
    **dict.fromkeys(("layer", "layers"), "op, group"),
    **dict.fromkeys(("gate", "gates", "gated"), "stream, operand, formula"),
    **dict.fromkeys(("qkv", "lm", "lmhead", "mlp", "ffn", "transformer"), "contraction, rows"),
    **dict.fromkeys(("llama", "qwen", "mixtral", "gpt"), "the structure that it has"),
}
"""Part of a name -> what to say."""
LAYER_NORM = re.compile(r"layer_?norm|norm_?layer", re.I)
"""What is no layer: the op layer norm."""
PROSE = re.compile(r"\b(vocab\w*|tokens?|decod\w+)\b", re.I)
"""What comments and messages don't say either."""
OF_EXPRESSIONS = frozenset({"expr", "exprs", "expression", "expressions", "formula", "formulas"})
EQUALITY = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)


def kernel_files() -> list[Path]:
    return sorted((ROOT / "kernels").rglob("*.py"))


def said(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of all that a module names, its own or another's."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield line, name
            case ast.ClassDef(name=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                yield line, name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield line, name
            case ast.alias(name=name, asname=other):
                yield from ((line, each) for each in (name.rpartition(".")[2], other or ""))
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield line, name
            case ast.MatchClass(kwd_attrs=names):
                yield from ((line, name) for name in names)
            case ast.ExceptHandler(name=str(name)):
                yield line, name
            case ast.Constant(value=str(name)) if name.isidentifier():
                yield line, name


def fault(name: str) -> str:
    """What to say instead of a name, "" where it may stay."""
    words = parts(LAYER_NORM.sub("", name))
    return "; ".join(INSTEAD[word] for word in sorted(words & INSTEAD.keys()))


def faults(path: str, tree: ast.AST) -> list[str]:
    return [f"{path}:{line} {name}: say {say}" for line, name in said(tree) if (say := fault(name))]


def constant_comparisons(tree: ast.AST) -> Iterator[int]:
    """Lines that compare an expression with a constant one: a text, a name of a constant, or what a
    call makes of constants alone; and cases of a match that state a call of a certain function.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [left, *others]
                if (
                    isinstance(ops[0], EQUALITY)
                    and any(map(is_expression, sides))
                    and any(map(is_constant, sides))
                ):
                    yield node.lineno
            case ast.MatchClass(cls=cls, patterns=[ast.MatchValue(value=value), *_]):
                if ast.unparse(cls) in ("Call", "expr.Call") and is_constant(value):
                    yield node.lineno


def is_expression(node: ast.expr) -> bool:
    """Whether a side of a comparison is an expression of a program, or a call that gives one."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(parts(name) & OF_EXPRESSIONS) and not name.isupper()
        case ast.Call(
            func=ast.Attribute(attr="attr" | "get"), args=[ast.Constant(value="expr"), *_]
        ):
            return True
        case ast.Call(func=function, args=[first, *_]):
            text = ast.unparse(function)
            return text in ("str", "canonical", "expr.parse", "parse") and is_expression(first)
        case _:
            return False


def is_constant(node: ast.expr) -> bool:
    """Whether a side of a comparison is the same for all programs, and not empty."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, str) and value != ""
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper()
        case ast.Call(args=args) if args:
            return all(isinstance(each, ast.Constant) or is_constant(each) for each in args)
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items) if items:
            return all(map(is_constant, items))
        case _:
            return False


def test_no_name_says_what_an_op_is_for_in_a_model():
    found = [
        fault
        for path in kernel_files()
        for fault in faults(str(path.relative_to(ROOT)), parsed(path))
    ]
    assert not found


def test_no_file_is_named_after_a_part_of_a_model():
    names = {
        part for path in kernel_files() for part in path.relative_to(ROOT).with_suffix("").parts
    }
    assert not [name for name in names if fault(name)]


def test_comments_and_messages_say_no_such_word():
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in kernel_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if PROSE.search(line)
    ]
    assert not found


def test_no_rule_compares_an_expression_with_a_constant_one():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in kernel_files()
        for line in constant_comparisons(parsed(path))
    ]
    assert not found


def test_a_word_is_found_in_every_kind_of_name():
    source = (
        "from models import lm_head as top\n"
        "class DecodePlan:\n"
        "    def run(self, qkv, *, num_layers): self.hidden = given.vocab\n"
        "place(gate=fields['next_token'])\n"
        "match one:\n"
        "    case Linear(ffn=prompt): pass\n"
        "LAYER_NORM, layer_norms, NORM_LAYER, kind = 1, 2, 3, 'layer_norm'\n"
        "tokenless, slayer, numbers, hiddenness = 'a token of it', 1, 2, 3\n"
    )
    found = {each.split()[1].rstrip(":") for each in faults("x.py", ast.parse(source))}
    assert found == {
        "lm_head", "DecodePlan", "qkv", "num_layers", "hidden", "vocab", "gate", "next_token",
        "ffn", "prompt",
    }  # fmt: skip


def test_a_comparison_with_a_constant_expression_is_found():
    wrong = (
        "formula == 'silu(a0) * a1'",
        "op.formula in (GATED, PLAIN)",
        "str(op.attr('expr')) != 'a0 + a1'",
        "canonical(formula) == expr.parse('a0')",
        "expr.Arg(0) == epilogue.formula",
        "match x:\n    case expr.Call('mul', parts): pass",
    )
    right = (
        "formula is None", "formula == ''", "one.formula == other.formula", "formula in formulas",
        "OP == words[OPCODE]", "num_exprs <= MAX_OUTPUTS", "count(FORMULAS) > 0", "fn == 'silu'",
        "match x:\n    case expr.Call(fn, args): pass",
    )  # fmt: skip
    for source in wrong:
        assert list(constant_comparisons(ast.parse(source))), source
    for source in right:
        assert not list(constant_comparisons(ast.parse(source))), source
