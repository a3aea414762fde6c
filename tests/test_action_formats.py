"""What is read from a turn in each format, what is refused, and that what is written is read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bpo_jax import action_formats
from bpo_jax.action_formats import FORMATS, InvalidAction, named

CALL = '{"name": "act", "arguments": {"action": "look"}}'
LLAMA_CALL = '{"name": "act", "parameters": {"action": "look"}}'
MARKS = [
    "<think>", "</think>", "<action>", "</action>", "Action:", "Thought:", "\n", " ", "look",
    "<tool_call>", "</tool_call>", CALL, LLAMA_CALL, '{"name": ', "{", "}", '"\\ud800"',
    "<|python_tag|>", "```", "```bash", "```python", "\r", "\x00", "\ud800", "[" * 2000,
]  # fmt: skip

# Whatever is no mark of a format and no line break; white space around an action is none of it.
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n<`:"), max_size=40)
actions = words.map(str.strip).filter(bool)


@pytest.mark.parametrize("name", FORMATS)
@given(action=actions, thought=words)
def test_a_written_action_is_read_back(name, action, thought):
    form = named(name)
    assert form.parse(form.write(action)) == action
    assert form.parse(form.write(action, thought)) == action


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text() | st.lists(st.sampled_from(MARKS)).map("".join))
def test_any_text_is_read_or_refused_with_a_reason(name, text):
    read = named(name).parse(text)
    if isinstance(read, InvalidAction):
        assert read.reason and read.penalty == 0.0
    else:
        assert read == read.strip()


@pytest.mark.parametrize("name", FORMATS)
@given(action=st.text() | st.lists(st.sampled_from(MARKS)).map("".join), thought=st.text())
def test_what_cannot_be_read_back_is_not_written(name, action, thought):
    form = named(name)
    try:
        turn = form.write(action, thought)
    except ValueError as error:
        assert "cannot be written as" in str(error)
    else:
        assert form.parse(turn) == action


@pytest.mark.parametrize("name", ["think_action", "tool_call", "tool_json", "bash_block"])
def test_a_turn_cut_before_its_end_is_refused_where_the_format_closes_actions(name):
    form = named(name)
    turn = form.write("go to desk 12", "The desk is near.")
    for length in range(len(turn)):
        assert isinstance(form.parse(turn[:length]), InvalidAction), turn[:length]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "plain"])
def test_a_marker_stands_between_thought_and_action(name):
    form = named(name)
    before, marker, after = form.write("look", "Where am I?").partition(form.markers[0])
    assert marker and "look" not in before and "look" in after
    assert ("Where am I?" in before) or name == "think_line"


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "plain"])
def test_the_instructions_are_one_paragraph_that_shows_the_marks(name):
    form = named(name)
    assert "\n\n" not in form.instructions
    mark = {"think_line": "</think>", "tool_json": '{"name"'}.get(name, form.markers[0].strip())
    assert mark in form.instructions


def test_plain_adds_nothing_to_the_prompt():
    assert named("plain").instructions == ""


READABLE = [
    ("plain", " look \n", "look"),
    ("plain", "", ""),
    ("plain", "<think>a</think> look", "<think>a</think> look"),
    ("think_line", "look", "look"),
    ("think_line", "<think>a\nb</think>\n\n  look  \n", "look"),
    ("think_line", "opened by the prompt\n</think>\n\nlook", "look"),
    ("think_line", "<THINK>a</Think>look", "look"),
    ("think_action", "<think>a</think><action>look</action>", "look"),
    ("think_action", "opened by the prompt</think><action> look\n</action>", "look"),
    ("think_action", "<think></think> so: <ACTION>look</ACTION> and that is it", "look"),
    ("think_action", "<think>an <action>x</action>?</think><action>look</action>", "look"),
    ("react", "Thought: the desk\nAction: look", "look"),
    ("react", "action:look\n", "look"),
    ("react", "Thought 2: a\nAction 2: look", "look"),
    ("react", "Thought: my next Action: line\n  ACTION : look", "look"),
    ("tool_call", f"<tool_call>\n{CALL}\n</tool_call>", "look"),
    ("tool_call", f"<think>a</think>Now: <tool_call>{CALL}</tool_call>", "look"),
    ("tool_call", f"<tool_call>{LLAMA_CALL}</tool_call> done", "look"),
    ("tool_call", LLAMA_CALL, "look"),
    ("tool_json", LLAMA_CALL, "look"),
    ("tool_json", f"<|python_tag|>{LLAMA_CALL}", "look"),
    ("tool_json", '{"type": "function", ' + LLAMA_CALL[1:], "look"),
    ("tool_json", f"<tool_call>{CALL}</tool_call>", "look"),
    ("bash_block", "I list.\n\n```bash\nls\n```\nThat is all.", "ls"),
    ("bash_block", "```sh\r\nls\ncd x\n```", "ls\ncd x"),
    ("bash_block", "```python\nprint()\n```\n```bash\nls\n```", "ls"),
    ("bash_block", "<think>```bash\nrm\n```</think>\n```bash\nls\n```", "ls"),
]


@pytest.mark.parametrize(("name", "turn", "action"), READABLE)
def test_readable_turns(name, turn, action):
    assert named(name).parse(turn) == action


UNREADABLE = [
    ("think_line", "", "got 0 lines"),
    ("think_line", "look\nexamine desk", "got 2 lines"),
    ("think_line", "<think>on and on", "not closed by </think>"),
    ("think_line", "<think>a</think>look</think>", "closes no thought"),
    ("think_action", "<action>look</action>", "Expected a thought"),
    ("think_action", "<think>a</think>look", "between <action>"),
    ("think_action", "<think>a</think><action> </action>", "between <action>"),
    ("think_action", "<think>a</think><action>look", "not closed by </action>"),
    ("think_action", "<think>a</think><action>a</action><action>b</action>", "got 2"),
    ("think_action", "<think>a</think><action>a<action>b</action>", "got 2"),
    ("react", "Thought: a", "begins with Action:"),
    ("react", "Thought: a\nAction:", "begins with Action:"),
    ("react", "Action: look\nAction: help", "got 2"),
    ("react", "Action: look\nObservation: A desk.", "nothing after"),
    ("react", "my Action: look", "begins with Action:"),
    ("tool_call", "look", "Expected a tool call"),
    ("tool_call", f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>", "got 2"),
    ("tool_call", f"<tool_call>{CALL}", "not closed by </tool_call>"),
    ("tool_call", f"<tool_call>{CALL[:-2]}</tool_call>", "no complete JSON"),
    ("tool_call", f"<tool_call>[{CALL}]</tool_call>", "Expected a tool call"),
    ("tool_call", CALL.replace("act", "search", 1), "Unknown tool"),
    ("tool_call", CALL.replace("action", "query"), "one argument, action"),
    ("tool_call", CALL.replace('"look"', "3"), "with a text"),
    ("tool_call", CALL.replace('"look"', '"look", "fast": true'), "one argument"),
    ("tool_json", CALL.replace("look", r"\ud800"), "no character"),
    ("tool_json", f"I call {LLAMA_CALL}", "Expected a tool call"),
    ("tool_json", f"{LLAMA_CALL}; {LLAMA_CALL}", "nothing after"),
    ("bash_block", "ls", "got 0"),
    ("bash_block", "```\nls\n```", "got 0"),
    ("bash_block", "```bash\nls\n```\n```bash\nls\n```", "got 2"),
    ("bash_block", "```bash\nls", "not closed"),
    ("bash_block", "```bash\nls\n```bash\nls\n```", "not closed"),
    ("bash_block", "```bash\n\n```", "empty"),
]


@pytest.mark.parametrize(("name", "turn", "reason"), UNREADABLE)
def test_unreadable_turns(name, turn, reason):
    read = named(name).parse(turn)
    assert isinstance(read, InvalidAction) and reason in read.reason


def test_bash_blocks_hold_several_lines_and_quotes():
    script = "cat > a.py <<'EOF'\nprint(\"`x`\")\nEOF\npython a.py"
    form = named("bash_block")
    assert form.parse(form.write(script, "First a file.")) == script


@pytest.mark.parametrize("name", ["tool_call", "tool_json"])
def test_tool_calls_hold_lines_quotes_and_backslashes_and_are_json(name):
    form, action = named(name), 'say "a\\n"\nand <b> é'
    turn = form.write(action)
    assert form.parse(turn) == action
    call = json.loads(turn[turn.index("{") : turn.rindex("}") + 1])
    assert {"action": action} in call.values()


@pytest.mark.parametrize(
    ("name", "action", "thought"),
    [
        ("plain", " look", ""),
        ("think_line", "look\nhelp", ""),
        ("think_action", "a</action>", ""),
        ("think_action", "look", "a</think>"),
        ("react", "look", "a\nAction: b"),
        ("tool_call", "<tool_call>", ""),
        ("bash_block", "a\n```\nb", ""),
    ],
)
def test_marks_of_the_format_cannot_be_written(name, action, thought):
    with pytest.raises(ValueError, match=f"cannot be written as {name}"):
        named(name).write(action, thought)


def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="unknown action format 'xml': expected one of plain, "):
        named("xml")


def test_every_format_is_found_by_its_name():
    assert all(action_formats.named(name).name == name for name in FORMATS)
