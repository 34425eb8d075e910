"""Answers that a hostile node might send: code, unbounded work, odd text."""

from __future__ import annotations

import json
from pathlib import Path


def hostile_answers(mark: Path) -> list[str]:
    """More than fifty. Those with code create the file `mark` where something evaluates them."""
    touch = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    shell = f"__import__('os').system('touch {mark}')"
    return code(touch, shell, mark) + expensive() + odd_text() + wrong_types()


def code(touch: str, shell: str, mark: Path) -> list[str]:
    return [
        touch,
        shell,
        f"[{touch}]",
        f"[[{touch}]]",
        f"({touch}, 1)[1]",
        f"[x for x in [{touch}]]",
        f"(lambda: {touch})()",
        f"x + {touch}",
        f"1 if {touch} else 2",
        f"{{{touch}: 1}}",
        f"sin({touch})",
        f"Symbol('x').subs('x', {touch!r})",
        f"sympify({touch!r})",
        f"f'{{{touch}}}'",
        f"{{0.__class__.__init__.__globals__[{touch!r}]}}",
        f"exec({touch!r})",
        f"eval({touch!r})",
        f"$({shell})",
        f"`touch {mark}`",
        f"; touch {mark} #",
        f"\\input{{|touch {mark}}}",
        f"<answer>{touch}</answer>",
        f"!!python/object/apply:os.system ['touch {mark}']",
        "().__class__.__bases__[0].__subclasses__()",
        "../../../../etc/passwd",
    ]


def expensive() -> list[str]:
    return [
        "9**9**9**9",
        "2**(2**(2**(2**9)))",
        "factorial(factorial(20))",
        "10!!!!!!!!",
        "(x+1)**20000",
        "((x+1)**900)**900",
        "sin(" * 200 + "x" + ")" * 200,
        "1e9999999999",
        "1/1e-9999999999",
        "[1e999999999]",
        "1E+999999999 + 1E-999999999j",
        "A+999999999",
        "R999999999",
        "x**99999999",
        "0:99999999999",
        "1..999999999999",
        "(" * 20_000,
        "[" * 20_000,
        "{" * 20_000,
        '{"a":' * 10_000 + "1" + "}" * 10_000,
        "-" * 20_000 + "1",
        "1+" * 20_000 + "1",
        "9" * 60_000,
        "1" * 4_300,
        "0." + "3" * 60_000,
        "," * 60_000,
        "1," * 30_000,
        "× ".join(["2"] * 15_000),
        "a b " * 15_000,
        "\n" * 60_000 + "1",
        "up down left right " * 3_000,
        "z" * 3_000_000,
        "7" * 3_000_000,
        "<answer>" * 200_000,
        "</answer>" * 200_000,
    ]


def odd_text() -> list[str]:
    return [
        "",
        " ",
        "\x00",
        "1\x00",
        "\udcff\ud800",
        "1\udc80",
        b"\xff\xfe\xfa 12".decode(errors="surrogateescape"),
        "\u202e1\u202c",
        "\u200f\u05d0\u0661\u0662",
        "\uff11\uff12",
        "²³",
        "½",
        "e\u0301" * 1000,
        "\U0001f600" * 1000,
        "\ufeff1",
        "nan",
        "NaN",
        "inf",
        "Infinity",
        "-Infinity",
        "nan+nanj",
        "1_000_000",
        "0x7f",
        "-0",
        "%s%n%d%x" * 100,
        "{}{0}{a.b}{0!r:>999999999}",
        "%999999999d",
        "${jndi:ldap://localhost/a}",
        "' OR 1=1 --",
        "\\frac{1}{0}",
        "1/0",
        "\r\n\t\v\f",
        "\x1b[2J\x07",
    ]


def wrong_types() -> list[str]:
    values: list[object] = [None, True, 1, -1.5, "a", [], {}, [None], [[]], [1, [2]], {"a": 1}, {"a": {"b": [None]}}, [{"x": []}]]
    values += [[["a"] * 50] * 50, {str(n): n for n in range(2000)}, [10**400], {"": ""}]
    return [json.dumps(value) for value in values] + ["[1, 2", "None", "()", "set()", "NaN[]", "[NaN]", "{'a': 1}", "{1, 2}"]
