"""Conversations that a template cannot write as they are. Would catch a form in which something else is said, a form
that is used without need, and a failure that is reported in the words of another form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smoe.conversation.chat_template import ChatTemplate
from smoe.conversation.conversation import Conversation, short_ids
from smoe.errors import ChatTemplateError, ChatTemplateLimitError
from tests.toy import ascii_tokenizer

Make = Callable[[str], ChatTemplate]
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}}
FULL = {"type": "function", "function": {"name": "rain", "description": "Rain?", "parameters": _PARAMETERS}}
BARE = {"type": "function", "function": {"name": "rain"}}
USER = {"role": "user", "content": "Hi"}


def call(id: str, arguments: Any = None) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "rain", "arguments": arguments or {"city": "Ulm"}}}


def called(*ids: str) -> list[dict[str, Any]]:
    results = [{"role": "tool", "tool_call_id": id, "content": "No"} for id in ids]
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call(id) for id in ids]}, *results]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ChatTemplate] = []

    def one(template: str) -> ChatTemplate:
        made.append(ChatTemplate(ascii_tokenizer(template)))
        return made[-1]

    yield one
    for each in made:
        each.close()


def test_a_template_may_append_to_lists_and_our_data_stays(make: Make) -> None:
    template = (
        "{% set seen = [] %}{% for m in messages %}{% set _ = seen.append(m.role) %}{% set _ = m.update(content='x') %}"
        "{% endfor %}{% set _ = messages.pop() %}{{ seen | join(',') }}{{ messages | length }}"
    )
    messages = called("a")
    before = copy.deepcopy(messages)
    assert make(template).write(Conversation(messages)) == "user,assistant,tool2"
    assert messages == before


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ tools[0].function.description + '!' }}", "!"),
        ("{{ tools[0].function.description | tojson }}", '""'),
        ("{{ tools[0].function.parameters | tojson }}", '{"type": "object", "properties": {}, "required": []}'),
        ("{% for name, p in tools[0].function.parameters.properties.items() %}{{ p.type }}{% endfor %}|", "|"),
        ("{{ tools[0] | tojson }}", '{"type": "function", "function": {"name": "rain"}}'),
    ],
)
def test_tools_without_description_or_parameters(make: Make, template: str, expected: str) -> None:
    """The last template has no need of them, and gets the tool as it was given."""
    assert make(template).write(Conversation([USER], [BARE])) == expected


def test_parameters_without_description(make: Make) -> None:
    template = "{% for p in tools[0].function.parameters.properties.values() %}{{ p.type + p.description }}{% endfor %}"
    tool = {"type": "function", "function": {"name": "rain", "parameters": {"properties": {"a": {"type": "number"}}}}}
    assert make(template).write(Conversation([USER], [tool])) == "number"
    assert make(template).write(Conversation([USER], [FULL])) == "stringA city"


def test_a_template_for_tools_alone_writes_conversations_without(make: Make) -> None:
    assert make("{% for tool in tools %}{{ tool }}{% endfor %}ok").write(Conversation([USER])) == "ok"


_NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine') }}"
    "{% endif %}[{{ c.id }}]{% endfor %}{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
)


def test_foreign_ids_are_mapped_where_the_template_refuses_them(make: Make) -> None:
    written = make(_NINE).write(Conversation(called("call_5f2e-77", "call_5f2e-78")))
    first, second = written[1:10], written[12:21]
    assert written == f"[{first}][{second}]({first})({second})" and first != second
    assert (first + second).isascii() and (first + second).isalnum()
    assert make(_NINE).write(Conversation(called("abcDEF123"))) == "[abcDEF123](abcDEF123)"
    assert make(_NINE.replace("!= 9", "> 99")).write(Conversation(called("call_1"))) == "[call_1](call_1)"


def test_mapped_ids_stay_from_turn_to_turn() -> None:
    """What was computed for the beginning of a conversation holds for the next turn."""
    one = short_ids(Conversation(called("call_1"))).messages
    assert short_ids(Conversation([*called("call_1"), *called("call_2")])).messages[: len(one)] == one


def test_text_joins_the_reasoning_where_a_template_takes_one_of_both(make: Make) -> None:
    """As gpt-oss's template before a call. Without calls, or without reasoning, the text stays."""
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}({{ m.thinking }}|{{ m.content }}){% endfor %}"
    )
    thought = {"role": "assistant", "content": "Wait.", "reasoning_content": "I look.", "tool_calls": [call("a")]}
    said = {"role": "assistant", "content": "Wait.", "reasoning_content": "I look."}
    written = make(template).write(Conversation([USER, thought, said]))
    assert written == "(|Hi)(I look.\n\nWait.|)(I look.|Wait.)"


def test_arguments_as_text_where_the_template_reads_text(make: Make) -> None:
    template = "{% for c in messages[1].tool_calls %}{{ 'a' + c.function.arguments }}{% endfor %}"
    assert make(template).write(Conversation(called("x"))) == 'a{"city": "Ulm"}'


_ROLES = (
    "{% for m in messages %}{% if m.role not in ROLES %}{{ raise_exception('role') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (_ROLES.replace("ROLES", "['user', 'system', 'developer']"), "developer:Be kind;user:Hi;"),
        (_ROLES.replace("ROLES", "['user', 'system']"), "system:Be kind;user:Hi;"),
        (_ROLES.replace("ROLES", "['user', 'system']") + "developer", "system:Be kind;user:Hi;developer"),
        (_ROLES.replace("ROLES", "['user']"), "user:Be kind\n\nHi;"),
        ("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", "system:Be kind;user:Hi;"),
        (
            "{% for m in messages %}{% if m.role != 'developer' %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}",
            "system:Be kind;user:Hi;",
        ),
    ],
)
def test_the_developer_is_system_where_the_template_does_not_know_the_role(
    make: Make, template: str, expected: str
) -> None:
    """The last template knows the name and leaves the text out."""
    assert make(template).write(Conversation([{"role": "developer", "content": "Be kind"}, USER])) == expected


def test_what_needs_several_forms_gets_them(make: Make) -> None:
    template = "{{ tools[0].function.description + '' }}" + _NINE
    assert len(make(template).write(Conversation(called("call_1"), [BARE]))) == len("[123456789](123456789)")


def test_a_failure_that_no_form_avoids_is_told_in_the_words_of_the_first(make: Make) -> None:
    raises = "{{ raise_exception(WORD) }}"
    second = raises.replace("WORD", "'second'")
    template = f"{{% if tools[0].function.description is defined %}}{second}{{% endif %}}"
    template += raises.replace("WORD", "'first'")
    chat_template = make(template)
    with pytest.raises(ChatTemplateError, match=r"^first$"):
        chat_template.write(Conversation([USER], [BARE]))
    assert chat_template.state == "ok"


def test_the_state_tells_of_a_template_that_does_not_end(make: Make) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    chat_template = make(f"{{% if messages[0].content == 'x' %}}{loops}{{% endif %}}")
    chat_template.write(Conversation([USER]))
    chat_template._process.seconds = 0.5
    with pytest.raises(ChatTemplateLimitError):
        chat_template.write(Conversation([{"role": "user", "content": "x"}]))
    assert chat_template.state == "failed"
    chat_template._process.seconds = 60.0
    chat_template.write(Conversation([USER]))
    assert chat_template.state == "ok"
    assert ChatTemplate(ascii_tokenizer()).state == "none"
