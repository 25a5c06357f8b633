"""Chat templates: rendered in a process of their own, within limits."""

import subprocess
import sys

import pytest
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from distmega.errors import ChatTemplateError, ModelError, RequestError
from distmega.models.text.chat_template import RenderLimits, render_chat
from tests.fuzz import damaged, fuzz_target

MESSAGES = [{"role": "user", "content": "hi <b>"}]
QUICK = RenderLimits(cpu_s=1, memory_bytes=2**28, num_chars=2**22)
TOO_MUCH = "it takes too much|it takes more than 1 s|it writes more than 4194304 characters"


def test_a_template_gets_messages_and_special_tokens():
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}\n"
        "{% if loop.first %}{% continue %}{% endif %}never{% endfor %}"
        "{% if add_generation_prompt %}{{ {'a': 1} | tojson }}{% endif %}"
    )
    assert render_chat(template, MESSAGES, {"bos_token": "<s>"}) == '<s>[user] hi <b>\n{"a": 1}'
    assert render_chat("{{ messages[0].content }}", [{"content": "\udcff\n"}], {}) == "\udcff\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0] | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}",
        "{{ {'a': 1, 'b': '\u00e9<'} | tojson(true, separators=(',', ':')) }}",
        "{% for m in messages %}{% generation %}{% set x = 1 %}[{{ m.role }}]\n"
        "{% endgeneration %}\n{{ x is defined }}{% endfor %}",
        "{% if tools is not none %}{{ tools | length }}{% endif %}",
        "{% if documents is none %}none{% endif %}{{ strftime_now('%Y') }}",
    ],
)
def test_a_template_finds_what_transformers_gives_it(template: str):
    (expected,), _ = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=True
    )
    assert render_chat(template, MESSAGES, {}) == expected


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ 'a' * 10**11 }}", TOO_MUCH),
        ("{{ 'a'.center(10**10) }}", TOO_MUCH),
        ("{{ messages | tojson(indent=10**9) }}", TOO_MUCH),
        ("{{ '%1000000000d' % 1 }}", TOO_MUCH),
        ("{{ '{:1000000000}'.format(1) }}", TOO_MUCH),
        ("{{ 10 ** (10 ** 10) }}", TOO_MUCH),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "it takes more than 1 s",
        ),
        ("{% for a in range(99999) %}{{ 'abc' * 1000 }}{% endfor %}", TOO_MUCH),
        ("{{ lipsum(n=10**7) }}", TOO_MUCH),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", TOO_MUCH),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", f"{TOO_MUCH}|nested"),
        ("{% break %}", "break"),
        ("{% for %}", "Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages[0].x.y }}", "has no attribute 'x'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('no system') }}", "no system"),
        ("{% include 'a' %}", "no loader"),
        ("x" * 2**21, "2097152 characters"),
    ],
)
def test_a_template_that_fails_or_takes_too_much(template: str, named: str):
    with pytest.raises(
        ChatTemplateError, match=f"the chat template of the model fails: .*({named})"
    ):
        render_chat(template, MESSAGES, {}, QUICK)
    assert render_chat("{{ messages[0].role }}", MESSAGES, {}) == "user"


def test_its_failure_may_be_the_models_or_the_requests():
    with pytest.raises(ModelError):
        render_chat("{% for %}", MESSAGES, {})
    with pytest.raises(RequestError):
        render_chat("{% for %}", MESSAGES, {})


def test_messages_are_plain_values():
    with pytest.raises(RequestError, match="messages that can't be passed on"):
        render_chat("x", [{"role": object()}], {})


def test_a_clock_that_runs_out_is_told():
    slow = RenderLimits(cpu_s=60, clock_s=0.2)
    with pytest.raises(ChatTemplateError, match=r"it takes more than 0\.2 s, or was killed"):
        render_chat("{% for a in range(99999) %}{{ lipsum() }}{% endfor %}", MESSAGES, {}, slow)


def test_the_process_ends_with_its_parent():
    code = (
        "from distmega.models.text.chat_template import _worker, render_chat\n"
        "assert render_chat('a', [], {}) == 'a'\n"
        "print(_worker._process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr == ""
    alive = subprocess.run(["ps", "-p", done.stdout.strip()], check=False, capture_output=True)
    assert alive.returncode == 1


SEEDS = (
    "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no') }}{%- else -%}"
    "{% set ns = namespace(x=1) %}{{ ns.x + 1 }}{{ bos_token }}{% endif %}",
    "{% macro a(b) %}{{ b | upper }}{% endmacro %}{{ a('x') }}{{ messages | tojson(indent=2) }}",
)
WORDS = (
    "{{", "}}", "{%", "%}", "(", ")", "[", "*", "%", "'", "99999999", "range(9999)", "messages",
    "for x in ", " if ", "endfor", "endif", "loop", ".x", "|", "join", "format", "lipsum()", "self",
    "~", ":", "-", "set a =", "macro m()", "import", "extends 'a'", "'a' * 9", "__class__",
)  # fmt: skip
test_templates = fuzz_target(
    damaged(SEEDS, WORDS) | st.text(), lambda text: render_chat(text, MESSAGES, {}, QUICK)
)
