"""How the scripts are written: sizes, density, order, help texts, dependencies.

Counted is what a reader must take in: code tokens, not lines, which a formatter makes and unmakes;
comments and docstrings do not count, so that a good explanation costs nothing.
"""

import ast
import io
import re
import tokenize
import tomllib

import pytest
from conftest import CLASSIC_SCRIPTS, LLM_SCRIPTS, ROOT
from lineage import FAMILY, PATHS, family_of, parts

SCRIPTS = LLM_SCRIPTS + CLASSIC_SCRIPTS
MOST_TOKENS_A_LINE = {"llm": 11, "classic": 10.5}
MAIN_ENDS_BY = {"dapo_llm": 345, "ppo_llm": 400}  # all others: line 310
LONGEST_FUNCTION = 55

LLM_PACKAGES = ["torch", "transformers", "tyro", "tensorboard", "tqdm"]
CLASSIC_PACKAGES = ["torch", "gymnasium[classic-control]", "tyro", "tensorboard", "tqdm", "pillow"]


def source(name: str) -> str:
    return (ROOT / PATHS[name]).read_text()


# ------------------------------------------------------------------------------------- the checkers


def is_text(statement) -> bool:
    """A docstring: of a module, class or function, or under a field."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def code_tokens(text: str) -> list[tokenize.TokenInfo]:
    """Everything but layout, comments and docstrings; an f-string is one token, as in Python 3.11.

    Python 3.12 takes f-strings apart, and the same text must not grow with the interpreter.
    """
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    layout |= {tokenize.ENDMARKER}
    opening, closing = (getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END"))
    docstrings = {
        (node.lineno, node.col_offset) for node in ast.walk(ast.parse(text)) if is_text(node)
    }
    found, inside = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        inside -= token.type == closing
        counts = token.type not in layout and token.start not in docstrings
        if counts and inside == 0 and token.type != closing:
            found.append(token)
        inside += token.type == opening
    return found


def poor_help(text: str) -> list[str]:
    """Fields of Args whose comment, above or behind, is missing or too short."""
    fields = {name: part for name, part in parts(text).items() if name.startswith("Args.")}
    fields.pop("Args.__post_init__", None)
    words = {name: " ".join(re.findall("# (.+)", part)).split() for name, part in fields.items()}
    return [name for name in fields if len(words[name]) < 4]


def metadata(text: str) -> dict:
    """The inline script metadata (PEP 723) with which a file ends, read as PEP 723 says."""
    pattern = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    (block,) = re.finditer(pattern, text)
    assert block["type"] == "script" and not text[block.end() :].strip()
    lines = block["content"].splitlines()
    return tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))


# -------------------------------------------------------------------------------------- the scripts


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_function_is_longer_than_a_screen(name):
    functions = [n for n in ast.walk(ast.parse(source(name))) if isinstance(n, ast.FunctionDef)]
    lines = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    assert max(lines.values()) <= LONGEST_FUNCTION, max(lines, key=lines.get)


@pytest.mark.parametrize("name", SCRIPTS)
def test_size(name):
    text = source(name)
    tokens = code_tokens(text)
    lines = {token.start[0] for token in tokens}
    found, allowed = (len(text.splitlines()), len(tokens)), FAMILY[name][2:]
    assert all(map(int.__le__, found, allowed)), "FAMILY of lineage.py: lines, tokens"
    assert len(tokens) / len(lines) <= MOST_TOKENS_A_LINE[family_of(name)], "one idea a line"


@pytest.mark.parametrize("name", LLM_SCRIPTS)
def test_the_algorithm_stands_first(name):
    """Flags, algorithm, update and main on the first pages, and below them what they call."""
    body = ast.parse(source(name)).body
    named = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    line = {node.name: node.lineno for node in named}
    assert named[0].name == "Args"
    order = ["Args", "compute_advantages", "token_weights", "surrogate", "train_minibatch"]
    order += ["train_step", "main", "token_logprobs", "generate", "evaluate", "verify"]
    assert sorted(order, key=line.get) == order
    (end,) = (node.end_lineno for node in named if node.name == "main")
    assert end <= MAIN_ENDS_BY.get(name, 310)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_has_its_help(name):
    assert not poor_help(source(name)), "a comment of four words or more, above or behind"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_copied_script_brings_its_dependencies(name):
    """`uv run grpo_llm.py` installs what requirements.txt would."""
    found = metadata(source(name))
    pins = (ROOT / "requirements.txt").read_text().split()
    packages = LLM_PACKAGES if name in LLM_SCRIPTS else CLASSIC_PACKAGES
    expected = [pin for pin in pins if pin.partition("==")[0] in packages]
    assert found["requires-python"] == ">=3.11"
    assert sorted(found["dependencies"]) == sorted(expected) and len(expected) == len(packages)
