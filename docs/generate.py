"""Writes the generated parts of the pages beside it, from the tables and signatures of the code.

    python docs/generate.py           writes what is stale
    python docs/generate.py --check   writes nothing; ends with 1 when something is stale

A generated part stands between `<!-- generated: start NAME, by docs/generate.py -->` and `<!-- generated: end -->`.
NAME is a key of `SECTIONS`. Everything outside these marks is written by hand and never touched. `fresh_pages` gives
every page as it should be; tests/docs compares it with what is there.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Final, TypeVar

import attrs

import lmcache_sdk
import lmcache_sdk.kvcache
from lmcache_sdk import devserver, errors
from lmcache_sdk.protocol import DIALECTS, Dialect
from lmcache_sdk.session import states

S = TypeVar("S", bound=enum.Enum)

DOCS: Final = Path(__file__).resolve().parent
_START: Final = r"<!-- generated: start (?P<name>[a-z-]+), by docs/generate\.py -->"
_PART: Final = re.compile(rf"(?P<start>{_START}\n).*?(?P<end><!-- generated: end -->)", re.DOTALL)
_WIDTH: Final = 100
_SECTION_NAMES: Final = ("Args:", "Returns:", "Raises:", "Attributes:")
_ITEM: Final = re.compile(r"(?P<names>[A-Za-z_][\w, *|]*): (?P<text>.*)")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: object) -> str:
    """Text in code marks; nothing for nothing."""
    return f"`{text}`" if str(text) else ""


# ---- dialects --------------------------------------------------------------------------------------------------------


def families() -> str:
    """What the releases share and what they do not, in one line each."""
    head = ("release", "family", "key", "registration", "inline payload", "configuration")
    return table(head, (_family_row(dialect) for dialect in DIALECTS.values()))


def _family_row(dialect: Dialect) -> tuple[str, ...]:
    return (
        dialect.release,
        dialect.family,
        dialect.key_form.value,
        dialect.registration_form.value.replace("and ", "8 fields, and "),
        dialect.payload_form.value,
        code(f"GET {dialect.config_path}"),
    )


def _request_types() -> list[type]:
    """Every request that some release has, in the order of the tables."""
    return list(dict.fromkeys(request for dialect in DIALECTS.values() for request in dialect.rules))


def opcodes() -> str:
    """Requests by releases: the integer or the name that the operation frame holds."""
    rows = []
    for request in _request_types():
        rules = [dialect.rules.get(request) for dialect in DIALECTS.values()]
        name = next(rule.name for rule in rules if rule is not None)
        cells = ["–" if rule is None else _opcode(rule.opcode) for rule in rules]
        rows.append((code(request.__name__), code(name), *cells))
    return table(("request", "operation", *DIALECTS), rows)


def _opcode(opcode: int | str) -> str:
    return "its name" if isinstance(opcode, str) else str(opcode)


def frames() -> str:
    """Requests and the fields that travel, one frame each, with the release in which they changed."""
    return table(("request", "payload frames", "reply"), (_frames_row(request) for request in _request_types()))


def _frames_row(request: type) -> tuple[str, str, str]:
    said: list[str] = []
    before: tuple[str, ...] | None = None
    for dialect in DIALECTS.values():
        rule = dialect.rules.get(request)
        if rule is None or rule.frames == before:
            continue
        shown = ", ".join(code(field) for field in rule.frames) or "none"
        said.append(shown if before is None and not said else f"from {dialect.release}: {shown}")
        before = rule.frames
    return code(request.__name__), "; ".join(said), code(_reply_name(request))


def _reply_name(request: type) -> str:
    """The R of a `Request[R]`."""
    base = request.__orig_bases__[0]  # type: ignore[attr-defined]  # every request subscripts its base
    name: str = base.__args__[0].__name__
    return name


def flags() -> str:
    """Behaviours by releases."""
    names = [field.name for field in attrs.fields(Dialect) if field.type in ("bool", bool)]
    meanings = _attribute_docstrings(Dialect)
    rows = [
        (code(name), *("yes" if getattr(d, name) else "no" for d in DIALECTS.values()), meanings[name])
        for name in names
    ]
    return table(("flag", *DIALECTS, "meaning"), rows)


def sources() -> str:
    """Where each release's facts come from."""
    return table(("release", "source"), ((dialect.release, dialect.source) for dialect in DIALECTS.values()))


def _attribute_docstrings(cls: type) -> dict[str, str]:
    """The string that stands below each annotated attribute, in one line."""
    found = re.findall(r'^    (\w+): [^\n]+\n    """(.*?)"""', inspect.getsource(cls), re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in found}


# ---- states ----------------------------------------------------------------------------------------------------------


def _machine(transitions: Mapping[S, Mapping[states.Event, S]]) -> str:
    """One state machine: a diagram, then the same as a table."""
    first = next(iter(transitions))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    rows = []
    for state, following in transitions.items():
        lines += [f"    {state.name} --> {to.name}: {event.value}" for event, to in following.items()]
        if not any(to is not state for to in following.values()):
            lines.append(f"    {state.name} --> [*]")
        rows += [(code(state.name), event.value, code(to.name)) for event, to in following.items()]
        rows += [] if following else [(code(state.name), "nothing: it is over", "")]
    return "\n".join((*lines, "```", "", table(("state", "when", "becomes"), rows)))


# ---- signatures ------------------------------------------------------------------------------------------------------


def _annotation(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"(?<=Literal\[)[^\]]*", lambda match: match[0].replace("'", '"'), text)


def _parameter(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        plain = isinstance(parameter.default, (str, int, float, bool, tuple, type(None)))
        shown = repr(parameter.default).replace("'", '"') if plain else "..."
        text += f" = {shown}"
    return text


def signature(name: str, function: Callable[..., object], *, without: Sequence[str] = ("self", "cls")) -> str:
    """A function as a stub shows it, on one line or one parameter a line."""
    found = inspect.signature(function)
    kept = [each for each in found.parameters.values() if each.name not in without]
    pieces = [_parameter(each) for each in kept]
    star = next((at for at, each in enumerate(kept) if each.kind is inspect.Parameter.KEYWORD_ONLY), None)
    if star is not None:
        pieces.insert(star, "*")
    returns = "" if inspect.isclass(function) else f" -> {_annotation(found.return_annotation)}"
    line = f"{name}({', '.join(pieces)}){returns}"
    if len(line) <= _WIDTH:
        return line
    return "\n".join((f"{name}(", *(f"    {piece}," for piece in pieces), f"){returns}"))


def docstring(of: object) -> str:
    """A Google-style docstring as Markdown: paragraphs, and a list for each section."""
    lines = (inspect.getdoc(of) or "").replace("2**32", "2³²").splitlines()
    made: list[str] = []
    section = ""
    for line in lines:
        if line.strip() in _SECTION_NAMES:
            section = line.strip()
            made += ["", f"{section}", ""]
        elif not line.strip():
            made.append("")
        elif not section:
            made.append(line.strip())
        else:
            made += _section_line(section, line.strip(), made)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(made)).strip()


def _section_line(section: str, line: str, before: Sequence[str]) -> list[str]:
    """An item of a section, or the continuation of one."""
    item = _ITEM.fullmatch(line) if section != "Returns:" else None
    if item is not None:
        names = ", ".join(code(name.strip()) for name in item["names"].split(","))
        return [f"- {names}: {item['text']}"]
    return [f"  {line}" if before and before[-1].startswith(("- ", "  ")) else line]


def _entry(heading: str, shown: str, of: object) -> str:
    return "\n".join((f"### {heading}", "", "```python", shown, "```", "", docstring(of), ""))


def module_functions() -> str:
    """The functions of the contract."""
    module = lmcache_sdk.kvcache
    order = ("connect", "lookup", "retrieve", "view", "store", "close")
    assert sorted(order) == sorted(module.__all__), "a public function without a place in this order"
    return "\n".join(_entry(name, signature(name, getattr(module, name)), getattr(module, name)) for name in order)


def context() -> str:
    """The methods of the context, then its properties."""
    cls = lmcache_sdk.LMCacheKVCacheContext
    members = {name: member for name, member in vars(cls).items() if not name.startswith("_")}
    methods = [
        _entry(f"ctx.{name}", signature(f"ctx.{name}", member), member)
        for name, member in members.items()
        if inspect.isfunction(member)
    ]
    rows = [
        (code(f"ctx.{name}"), code(_annotation(inspect.signature(_getter(member)).return_annotation)), _line(member))
        for name, member in members.items()
        if isinstance(member, property)
    ]
    return "\n".join(
        (*methods, "### Properties of the context", "", table(("property", "type", "what it is"), rows), "")
    )


def _getter(member: property) -> Callable[..., object]:
    assert member.fget is not None, "a property that cannot be read"
    return member.fget


def _line(of: object) -> str:
    return " ".join((inspect.getdoc(of) or "").split())


def results() -> str:
    """What lookup, store and view give."""
    view = _value(lmcache_sdk.KVView, "with ctx.view(tokens) as chunks:\n    ...")
    return "\n".join((*(_value(cls) for cls in (lmcache_sdk.LookupResult, lmcache_sdk.StoreResult)), view))


def layout() -> str:
    """KVLayout and its public methods."""
    return _value(lmcache_sdk.KVLayout)


def _value(cls: type, made: str | None = None) -> str:
    """A class of values: how it is made, its attributes, then what it can be asked."""
    entry = _entry(cls.__name__, made or signature(cls.__name__, cls), cls)
    rows = [
        (code(_asked(cls, name, member)), _summary(getattr(cls, name)))
        for name, member in vars(cls).items()
        if not name.startswith("_") and isinstance(member, (property, classmethod, FunctionType))
    ]
    return "\n".join((entry, table(("method or property", "what it gives"), rows), "")) if rows else entry


def _asked(cls: type, name: str, member: object) -> str:
    """A property with its type, or a method with its signature."""
    if isinstance(member, property):
        return f"{name}: {_annotation(inspect.signature(_getter(member)).return_annotation)}"
    return signature(name, getattr(cls, name))


def _summary(of: object) -> str:
    return " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split())


# ---- errors ----------------------------------------------------------------------------------------------------------


def error_classes() -> list[type[errors.KVCacheSDKError]]:
    """Every error class, in the order in which they are defined."""
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.KVCacheSDKError)
    ]


def error_facts() -> str:
    """Each error class: what it is a kind of, its fate unless the raiser knows better, and its own attributes."""
    rows = []
    for cls in error_classes():
        kinds = ", ".join(code(base.__name__) for base in cls.__bases__)
        own = [name for name in inspect.signature(cls).parameters if name not in ("message", "fate")]
        attributes = ", ".join(code(f".{name}") for name in own)
        rows.append((f"[`{cls.__name__}`](#{cls.__name__.lower()})", kinds, code(cls.fate.name), attributes))
    return table(("class", "is a", "`.fate`", "attributes"), rows)


# ---- the embedded server ---------------------------------------------------------------------------------------------


def devserver_settings() -> str:
    """The keywords of DevServer, those of Settings."""
    meanings = _attribute_docstrings(devserver.Settings)
    parameters = inspect.signature(devserver.Settings).parameters.values()
    rows = [(code(_parameter(each)), meanings.get(each.name, "")) for each in parameters]
    return table(("keyword", "meaning"), rows)


def devserver_members() -> str:
    """What a DevServer can be asked and told."""
    members = {name: member for name, member in vars(devserver.DevServer).items() if not name.startswith("_")}
    rows = [(code(_asked(devserver.DevServer, name, member)), _summary(member)) for name, member in members.items()]
    return table(("method or property", "what it does"), rows)


def devserver_values() -> str:
    """The values that go in and come out."""
    shown = (devserver.PlayedEngine, devserver.Held)
    return "\n".join(_entry(cls.__name__, signature(cls.__name__, cls), cls) for cls in shown)


# ---- pages -----------------------------------------------------------------------------------------------------------

SECTIONS: Final[Mapping[str, Callable[[], str]]] = {
    "dialect-families": families,
    "dialect-opcodes": opcodes,
    "dialect-frames": frames,
    "dialect-flags": flags,
    "dialect-sources": sources,
    "lease-states": lambda: _machine(states.LEASE_TRANSITIONS),
    "reservation-states": lambda: _machine(states.RESERVATION_TRANSITIONS),
    "session-states": lambda: _machine(states.SESSION_TRANSITIONS),
    "api-functions": module_functions,
    "api-context": context,
    "api-results": results,
    "api-layout": layout,
    "error-facts": error_facts,
    "devserver-settings": devserver_settings,
    "devserver-members": devserver_members,
    "devserver-values": devserver_values,
}


def fresh_text(text: str) -> str:
    """A page's text with its generated parts made anew; KeyError for a part that has no maker."""
    return _PART.sub(lambda part: f"{part['start']}{SECTIONS[part['name']]().rstrip()}\n{part['end']}", text)


def fresh_pages() -> dict[Path, str]:
    """Every page as it should be."""
    return {page: fresh_text(page.read_text(encoding="utf-8")) for page in sorted(DOCS.glob("*.md"))}


def main(arguments: Sequence[str]) -> int:
    """Writes, or with `--check` only looks."""
    stale = [page for page, fresh in fresh_pages().items() if page.read_text(encoding="utf-8") != fresh]
    for page in stale:
        sys.stdout.write(f"{page.name}: {'stale' if '--check' in arguments else 'written'}\n")
        if "--check" not in arguments:
            page.write_text(fresh_text(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
