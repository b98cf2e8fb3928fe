"""The documents: where they are, their code blocks, and the commands that they show."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))

# What begins a command in a line of text.
_COMMAND = re.compile(r"(make|bash|python|pip|pre-commit|\.venv/bin/python) [^<]+")


def blocks(path: Path, language: str) -> list[str]:
    """The code blocks of a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def commands(path: Path) -> list[str]:
    """What is to be typed into a shell: lines of shell blocks without their comments, and code in lines of text."""
    shown = [line.split("  #")[0].strip() for block in blocks(path, "sh") for line in block.splitlines()]
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    shown += [code for code in re.findall(r"`([^`]+)`", " ".join(prose.split())) if _COMMAND.fullmatch(code)]
    return [command for command in dict.fromkeys(shown) if command]
