"""The output formats of model families. A family is recognised by strings that its chat template contains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import regex

from smoe.server.output.output_format import Channels, Marks, OutputFormat
from smoe.server.output.tool_calls_json import CallSyntax, JsonCalls, NamedJson
from smoe.server.output.tool_calls_literal import Braced, Pythonic
from smoe.server.output.tool_calls_tagged import Nested, Tagged

_KIMI = NamedJson(
    head=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?NAME(?::\d+)?)\s*"
    r"<\|tool_call_argument_begin\|>",
    tail=r"(?:\s*<\|tool_call_end\|>)?(?:\s*<\|tool_calls_section_end\|>)?",
    marks=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    written=(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    keeps_id=True,
)
_KIMI_K3 = Tagged(
    head=r'(?:<\|open\|>tools<\|sep\|>\s*)?<\|open\|>call tool="NAME"[^<>]{0,40}<\|sep\|>',
    key=r'<\|open\|>argument key="KEY"(?: type="(?:(?P<is_text>string)|\w{1,20})")?<\|sep\|>',
    close="<|close|>argument<|sep|>",
    end=r"<\|close\|>call<\|sep\|>",
    tail=r"(?:\s*<\|close\|>tools<\|sep\|>)?",
    marks=("<|open|>tools<|sep|>", '<|open|>call tool="'),
    written=(
        '<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>',
        '<|open|>argument key="{key}" type="{kind}"<|sep|>',
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
    ),
)
_DEEPSEEK = NamedJson(
    head="(?:<｜tool▁calls▁begin｜>\\s*)?<｜tool▁call▁begin｜>\\s*NAME\\s*<｜tool▁sep｜>",
    tail="(?:\\s*<｜tool▁call▁end｜>)?(?:\\s*<｜tool▁calls▁end｜>)?",
    marks=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    written=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
)
_DEEPSEEK_R1 = NamedJson(
    head="(?:<｜tool▁calls▁begin｜>\\s*)?<｜tool▁call▁begin｜>\\s*function<｜tool▁sep｜>NAME\\s*```json",
    tail="(?:\\s*```)?(?:\\s*<｜tool▁call▁end｜>)?(?:\\s*<｜tool▁calls▁end｜>)?",
    marks=_DEEPSEEK.marks,
    written=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
)
_MISTRAL = NamedJson(
    head=r"\[TOOL_CALLS\]\s*NAME\s*(?:\[CALL_ID\]\w{1,100})?(?:\[ARGS\])?",
    tail="",
    marks=("[TOOL_CALLS]",),
    written=("[TOOL_CALLS]{name}[ARGS]", ""),
)


def _dsml(block: str) -> Tagged:
    return Tagged(
        head='(?:<｜DSML｜(?:function|tool)_calls>\\s*)?<｜DSML｜invoke name="NAME">',
        key='<｜DSML｜parameter name="KEY" string="(?P<is_text>true|false)">',
        close="</｜DSML｜parameter>",
        end="</｜DSML｜invoke>",
        tail="(?:\\s*</｜DSML｜(?:function|tool)_calls>)?",
        marks=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="'),
        written=(
            f'<｜DSML｜{block}>\n<｜DSML｜invoke name="{{name}}">\n',
            '<｜DSML｜parameter name="{key}" string="{is_text}">',
            f"</｜DSML｜invoke>\n</｜DSML｜{block}>",
        ),
        after="\n",
    )


def _invoke(begin: str, end: str, prefix: str = "") -> Tagged:
    """Return the syntax of XML elements `invoke` and `parameter`; `begin` and `end` enclose all calls."""
    return Tagged(
        head=rf'(?:{begin}\s*)?<{prefix}invoke name="NAME">',
        key=rf'<{prefix}parameter name="KEY">',
        close=f"</{prefix}parameter>",
        end=f"</{prefix}invoke>",
        tail=rf"(?:\s*{end})?",
        marks=(begin, f'<{prefix}invoke name="'),
        written=(
            f'{begin}\n<{prefix}invoke name="{{name}}">\n',
            f'<{prefix}parameter name="{{key}}">',
            f"</{prefix}invoke>\n{end}",
        ),
        after="\n",
    )


def _functions(begin: str, end: str, trims: bool) -> Tagged:
    """Return the syntax of elements `function=` and `parameter=`; `begin` and `end` enclose all calls."""
    return Tagged(
        head=rf"(?:{begin}\s*)?<function=NAME>",
        key="<parameter=KEY>",
        close="</parameter>",
        end="</function>",
        tail=rf"(?:\s*{end})?",
        marks=(begin, "<function="),
        written=(f"{begin}\n<function={{name}}>\n", "<parameter={key}>", f"</function>\n{end}"),
        after="\n",
        trims=trims,
    )


def _keyed(suffix: str = "", space: str = "\n") -> Tagged:
    """Return the syntax of a tool call that writes the function's name, then each key and each value in an element of
    its own."""
    sep = f"<tool_sep{suffix}>" if suffix else ""
    section = (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>") if suffix else ("", "")
    return Tagged(
        head=rf"(?:{section[0]}\s*)?<tool_call{suffix}>\s*NAME(?={sep or '[<]|' + chr(92) + 's'}){sep}",
        key=rf"<arg_key{suffix}>KEY</arg_key{suffix}>\s*<arg_value{suffix}>",
        close=f"</arg_value{suffix}>",
        end=f"</tool_call{suffix}>",
        tail=rf"(?:\s*{section[1]})?" if suffix else "",
        marks=(*((section[0],) if suffix else ()), f"<tool_call{suffix}>"),
        written=(
            f"{section[0]}{space if suffix else ''}<tool_call{suffix}>{{name}}{sep}{space}",
            f"<arg_key{suffix}>{{key}}</arg_key{suffix}>{space}<arg_value{suffix}>",
            f"</tool_call{suffix}>{space if suffix else ''}{section[1]}",
        ),
        after=space,
    )


_LLAMA = JsonCalls("<|python_tag|>", "", "name", "parameters", is_bare=True, separators="; \t\r\n")
_SYNTAXES: tuple[tuple[tuple[str, ...], CallSyntax], ...] = (
    (("<|tool_calls_section_begin|>",), _KIMI),
    (("<|open|>", "<|close|>", "<|sep|>"), _KIMI_K3),
    (("｜DSML｜", "function_calls"), _dsml("function_calls")),
    (("｜DSML｜",), _dsml("tool_calls")),
    (("<｜tool▁sep｜>", "```json"), _DEEPSEEK_R1),
    (("<｜tool▁sep｜>",), _DEEPSEEK),
    (("]<]minimax[>[",), Nested("]<]minimax[>[", "<tool_call>", "</tool_call>")),
    (("<minimax:tool_call>",), _invoke("<minimax:tool_call>", "</minimax:tool_call>")),
    (("<seed:tool_call>",), _functions("<seed:tool_call>", "</seed:tool_call>", trims=False)),
    (("<function=", "<parameter="), _functions("<tool_call>", "</tool_call>", trims=True)),
    (("<arg_key{}>", ":opensource"), _keyed(":opensource")),
    (("<arg_key>", "<tool_call>{function-name}<arg_key>"), _keyed(space="")),
    (("<arg_key>",), _keyed()),
    (
        ("<function=", "</function>"),
        NamedJson("<function=NAME>", r"(?:\s*</function>)?", ("<function=",), ("<function={name}>", "</function>")),
    ),
    (
        ("<function name=", "<param name="),
        Tagged(
            head='<function name="NAME">',
            key='<param name="KEY">',
            close="</param>",
            end="</function>",
            marks=('<function name="',),
            written=('<function name="{name}">', '<param name="{key}">', "</function>"),
            may_quote=True,
        ),
    ),
    (("<|tool_call>",), Braced("<|tool_call>call:", "<tool_call|>", '<|"|>')),
    (
        ("<|START_ACTION|>",),
        JsonCalls("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters", is_listed=True),
    ),
    (("Action:", "```json"), JsonCalls("Action:\n```json", "\n```", "tool_name", "parameters", True, "\n")),
    (("<TOOLCALL>",), JsonCalls("<TOOLCALL>", "</TOOLCALL>", is_listed=True)),
    (
        ("<tool_calls>", "<tool_call>", "```json"),
        NamedJson(
            head=r"(?:<tool_calls>\s*)?<tool_call>\s*NAME\s*```json",
            tail=r"(?:\s*```)?(?:\s*</tool_call>)?(?:\s*</tool_calls>)?",
            marks=("<tool_calls>", "<tool_call>"),
            written=("<tool_calls>\n<tool_call>{name}\n```json\n", "\n```\n</tool_call>\n</tool_calls>"),
        ),
    ),
    (("<tool_calls>",), JsonCalls("<tool_calls>", "</tool_calls>", is_listed=True)),
    (("<|tools_prefix|>",), JsonCalls("<|tools_prefix|>", "<|tools_suffix|>", is_listed=True, is_short=True)),
    (("<|function_call|>",), JsonCalls("<|function_call|>")),
    (("function call", "<|role_sep|>"), JsonCalls("<|message_sep|>\n\nfunction call<|role_sep|>\n")),
    (("functools",), JsonCalls("functools", is_listed=True)),
    (("<|tool_call_start|>",), Pythonic("<|tool_call_start|>", "<|tool_call_end|>")),
    (("<|tool_list_start|>",), Pythonic("<|tool_call_start|>", "<|tool_call_end|>")),
    (("<|im_start|>", "List of tools: ["), Pythonic("<|tool_call_start|>", "<|tool_call_end|>")),
    (("<|python_start|>",), Pythonic()),
    (("[func_name1(",), Pythonic()),
    (
        (">>>",),
        NamedJson(r"(?:>>>)?NAME\n", "", (">>>",), ("{name}\n", ""), bare=r"[\w.-]+\n\{"),
    ),
    (
        ("<|tool_call:begin|>",),
        NamedJson(
            head=r"(?:<\|tool_calls\|>\s*)?<\|tool_call:begin\|>(?P<id>[\w-]{0,100})<\|tool_call:name\|>NAME"
            r"<\|tool_call:args\|>",
            tail=r"(?:\s*<\|tool_call:end\|>)?",
            marks=("<|tool_calls|>", "<|tool_call:begin|>"),
            written=(
                "<|tool_calls|><|tool_call:begin|>call<|tool_call:name|>{name}<|tool_call:args|>",
                "<|tool_call:end|>",
            ),
        ),
    ),
    (("<|tool_call|>",), JsonCalls("<|tool_call|>", "<|/tool_call|>", is_listed=True)),
    (("<tool_call>",), JsonCalls("<tool_call>", "</tool_call>", space="\n")),
    (("[TOOL_CALLS]", "[ARGS]"), _MISTRAL),
    (("[TOOL_CALLS]",), JsonCalls("[TOOL_CALLS]", is_listed=True, space="")),
    (("<|python_tag|>",), _LLAMA),
    (('"parameters"', "ipython"), _LLAMA),
)
"""Pairs (strings that occur in a chat template, the syntax of tool calls that they indicate). The first pair counts all
of whose strings the template contains."""
_REASONING = (
    (("<seed:think>",), Marks("<seed:think>", "</seed:think>")),
    (("<mm:think>",), Marks("<mm:think>", "</mm:think>")),
    (("[THINK]",), Marks("[THINK]", "[/THINK]")),
    (("<|START_THINKING|>",), Marks("<|START_THINKING|>", "<|END_THINKING|>")),
    (("<|channel>",), Marks("<|channel>thought", "<channel|>")),
    (("<|open|>", "think", "<|sep|>"), Marks("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
    (("[BEGIN FINAL RESPONSE]",), Marks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")),
    (("<|inner_prefix|>",), Marks("<|inner_prefix|>", "<|inner_suffix|>")),
    (("<|begin|>", "<|think|>"), Marks("<|think|>", "<|end|>")),
    (("<think{}>", ":opensource"), Marks("<think:opensource>", "</think:opensource>")),
    (("</think>",), Marks("<think>", "</think>")),
    (("<think>",), Marks("<think>", "</think>")),
)
"""Pairs (strings that occur in a chat template, the marks around reasoning that they indicate)."""
_LEFT_OUT = (
    (("<|START_RESPONSE|>",), ("<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    (("<|START_TEXT|>",), ("<|CHATBOT_TOKEN|>", "<|START_TEXT|>", "<|END_TEXT|>")),
    (("<|CHATBOT_TOKEN|>",), ("<|CHATBOT_TOKEN|>",)),
    (("<response></response>",), ("<response>", "</response>")),
    (
        ("<|open|>", "<|sep|>"),
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    (("<|channel>",), ("<|channel>",)),
    (("<|begin|>", "<|content|>"), ("<|begin|>assistant", "<|content|>", "<|end|>")),
    ((">>>all",), (">>>all\n",)),
)
"""Pairs (strings that occur in a chat template, the marks that are then removed from answers)."""
_HARMONY = Channels(
    reasoning=Marks("<|channel|>analysis<|message|>", "<|end|>"),
    ends=("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"),
    begins=("<|start|>", "<|channel|>", "<|message|>", " to="),
    header=regex.compile(
        r".*?to=(?:functions\.)?(?!assistant\b)(?P<tool>[^\s<]+)|.*(?P<reasoning>analysis)(?!.*<\|channel)", regex.S
    ),
    answered="<|channel|>final<|message|>",
    written=("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "<|call|>"),
)
_MUSE = Channels(
    reasoning=Marks(" to=self<|message|>", "<|eom|>"),
    calls=_invoke("<atem:function_calls>", "</atem:function_calls>", "atem:"),
    ends=("<|eom|>", "<|eot|>", "<|start|>"),
    begins=("<|start|>", "<|message|>", " to="),
    header=regex.compile(r"to=(?:(?P<reasoning>self)|user|(?P<tool>[^\s<]+))(?!.*to=)"),
    answered=" to=user<|message|>",
    written=(" to={name}<|message|>", ""),
)
_CHANNELS = (
    (("<|channel|>", "<|message|>", "<|start|>"), _HARMONY),
    (("<atem:invoke", "<|message|>"), _MUSE),
    (("<atem:function_calls>", "<|message|>"), _MUSE),
)


def format_of(template: str) -> OutputFormat:
    """Return the output format of models with this chat template."""
    channels: Channels | None = _first(_CHANNELS, template)
    if channels is not None:
        return channels
    return OutputFormat(
        _first(_REASONING, template),
        _first(_SYNTAXES, template),
        _first(_LEFT_OUT, template) or (),
        opening="all\n" if ">>>all" in template else "",
        reasons_again="<|channel>" in template,
    )


def _first(table: Sequence[tuple[tuple[str, ...], Any]], template: str) -> Any:
    """Return the value of the first entry all of whose strings the chat template contains; None if there is no such
    entry."""
    return next((value for texts, value in table if all(text in template for text in texts)), None)
