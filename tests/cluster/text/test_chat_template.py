import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cluster.text.chat_template import ChatTemplate, ChatTemplateError, ConversationError
from tests.cluster.tiny_tokenizer import CHATML

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
CONVERSATION = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Grüße, 'world'!\n"},
    {"role": "assistant", "content": " Yes. "},
    {"role": "user", "content": "{{ not a template }}"},
]

TEMPLATES = {
    "chatml": CHATML,
    "whitespace": """
        {%- for message in messages %}
            {%- if loop.first and message.role != 'system' %}
                {{- 'default' }}
            {%- endif %}
    {% if message.role == 'user' %}
    U: {{ message.content | trim }}
    {% elif message.role == 'system' %}
    S: {{ message['content'] }}
    {% else %}
    A:{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {% endif %}
        {%- endfor %}
        {%- if add_generation_prompt %}{{ '\n' ~ 'A:' }}{% endif %}
    """,
    "macros": """{%- macro turn(m, i) -%}[{{ i }}/{{ m.role | upper }}] {{ m.content }}{%- endmacro -%}
        {{- bos_token }}{% for m in messages if m.role != 'system' %}{{ turn(m, loop.index) }}
        {%- if not loop.last %} | {% endif %}{% endfor %}""",
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ 'ü<>&' | tojson }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(count=0, roles=[]) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}"
    "{% set ns.roles = ns.roles + [m.role] %}{% endfor %}{{ ns.count }} {{ ns.roles | join(',') }}",
    "variables": "{{ flavour | default('none') }}{% if tools is none %} no tools{% endif %}{{ '%s-%d' % ('a', 3) }}"
    "{{ '{}'.format(2) }}{{ messages[1:] | length }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ 'a' in 'abc' }}{{ messages[0].get('name', 'unnamed') }}{{ undefined_name }}",
}


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"), **SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"flavour": "mint"}])
def test_equals_transformers(
    reference: PreTrainedTokenizerFast, name: str, add_generation_prompt: bool, variables: dict[str, Any]
) -> None:
    expected = reference.apply_chat_template(
        CONVERSATION,
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    assert template.render(CONVERSATION, add_generation_prompt=add_generation_prompt, variables=variables) == expected


@pytest.mark.parametrize("name", ["chatml", "whitespace"])
@pytest.mark.parametrize("content", ["The answer is", " padded ", "two\nlines\n"])
def test_continuing_the_final_message_equals_transformers(
    reference: PreTrainedTokenizerFast, name: str, content: str
) -> None:
    conversation = [*CONVERSATION, {"role": "assistant", "content": content}]
    expected = reference.apply_chat_template(
        conversation, chat_template=TEMPLATES[name], tokenize=False, continue_final_message=True
    )
    rendered = ChatTemplate(TEMPLATES[name], SPECIAL).render(
        conversation, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected


def test_a_final_message_that_is_not_rendered_cannot_be_continued() -> None:
    with pytest.raises(ConversationError, match="continue_final_message"):
        ChatTemplate("nothing", {}).render(CONVERSATION, continue_final_message=True)


def test_the_date_is_today() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", {}).render([]) == str(datetime.now().year)


def test_variables_do_not_replace_messages_or_special_tokens() -> None:
    template = ChatTemplate("{{ messages | length }}{{ bos_token }}", SPECIAL)
    assert template.render([], variables={"messages": [1, 2], "bos_token": "x"}) == "0<|endoftext|>"


def test_the_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(ConversationError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([])


@pytest.mark.parametrize("source", ["{% for %}", "{{", "{% nosuchtag %}", "{{ 1 | nosuchfilter }}", "{% if a %}"])
def test_a_template_that_does_not_compile_is_refused_at_start(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate(source, {})


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "long range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "repetition": "{{ 'a' * 10 ** 12 }}",
    "repetition, other side": "{{ 10 ** 12 * [0] }}",
    "doubling": "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by +": "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling a list": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "output": "{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}",
    "huge power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "growing product": "{% set n = namespace(i=9) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching recursion": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "padding by a method": "{{ 'a'.ljust(10 ** 12) }}",
    "padding by a filter": "{{ 'a' | center(1000000000000) }}",
    "padding by %": "{{ '%999999999999d' % 1 }}",
    "padding by % from outside": "{{ '%*d' % (99999999, 1) }}",
    "padding by format": "{{ '{:>999999999999}'.format(1) }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.keys() }}",
    "function internals": "{{ strftime_now.__code__.co_consts }}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a message": "{{ messages[0].update({'role': 'x'}) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "undefined attribute": "{{ nothing.at.all }}",
    "wrong type": "{{ 1 + 'a' }}",
    "division": "{{ 1 / 0 }}",
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_soon_and_reaches_nothing(name: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ConversationError, match=re.compile("^the chat template (refuses|fails on) these messages")):
        ChatTemplate(HOSTILE[name], SPECIAL).render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_a_long_conversation_is_within_the_budget() -> None:
    messages = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "yes"}] * 1000
    assert len(ChatTemplate(TEMPLATES["whitespace"], SPECIAL).render(messages)) > 1_000_000
