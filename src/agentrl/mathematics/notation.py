r"""Converts the many notations of mathematics to one canonical notation.

The output consists of ASCII characters, LaTeX's commands for expressions, `\text{}` for words, and
the signs `\degree`, `\percent`, `\dollar`, `\euro`, `\sterling`, `\yen` and `\cent`. It never
fails: a text that is not mathematics gives some text.
"""

import re
import unicodedata
from collections.abc import Callable

_SUPERSCRIPTS = dict(
    zip(
        "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b\u207a\u207f\u2071",
        "0123456789-+ni",
        strict=True,
    )
)
_SUBSCRIPTS = dict(
    zip("\u2080\u2081\u2082\u2083\u2084\u2085\u2086\u2087\u2088\u2089", "0123456789", strict=True)
)
_SIGNS = {
    "\u2212": "-", "\u2010": "-", "\u2011": "-", "\u2012": "-", "\u2013": "-", "\u2014": "-",
    "\u00d7": r"\cdot ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u2219": r"\cdot ",
    "\u2217": r"\cdot ", "\u00f7": "/", "\u2044": "/", "\u2215": "/", "\u2236": ":",
    "\u2264": r"\le ", "\u2a7d": r"\le ", "\u2265": r"\ge ", "\u2a7e": r"\ge ", "\u2260": r"\ne ",
    "\u2248": r"\approx ", "\u2208": r"\in ", "\u222a": r"\cup ", "\u2229": r"\cap ",
    "\u2216": r"\setminus ", "\u2205": r"\emptyset ", "\u221e": r"\infty ", "\u00b1": r"\pm ",
    "\u2213": r"\mp ", "\u00b0": r"\degree ", "\u00ba": r"\degree ", "\u2032": "'",
    "\u20ac": r"\euro ", "\u00a3": r"\sterling ", "\u00a5": r"\yen ", "\u00a2": r"\cent ",
    "\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}", "\u2115": r"\mathbb{N}",
    "\u211a": r"\mathbb{Q}", "\u2102": r"\mathbb{C}", "\u2026": r"\ldots ", "\u22ef": r"\ldots ",
    "\u27e8": r"\langle ", "\u27e9": r"\rangle ", "\u221b": r"\sqrt[3]", "\u221c": r"\sqrt[4]",
    "\u221a": r"\sqrt", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"',
    "\u2009": " ", "\u202f": " ", "\u00a0": " ", "\u200b": "", "\ufeff": "", "\u2061": "",
}  # fmt: skip
_GREEK = [
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "omicron", "pi", "rho", "_", "sigma", "tau", "upsilon",
    "phi", "chi", "psi", "omega",
]  # fmt: skip
_CAPITALS = "gamma delta theta lambda xi pi sigma upsilon phi psi omega"
_SIGNS |= {chr(0x3B1 + place): f"\\{name} " for place, name in enumerate(_GREEK) if name != "_"}
_SIGNS |= {
    chr(0x391 + place): f"\\{name.capitalize()} "
    for place, name in enumerate(_GREEK)
    if name
    in ["gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega"]
}

_FONTS = (
    "mathrm|mathbf|mathit|mathsf|mathtt|textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox|"
    "operatorname|boldsymbol|bold|bm|emph|underline"
)
_NO_INK = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|thinspace|left|right|middle|bigl|bigr|"
    r"Bigl|Bigr|biggl|biggr|Biggl|Biggr|big|Big|bigg|Bigg|mathstrut|strut)(?![A-Za-z])\.?"
)
_SPACES = re.compile(
    r"\\(?:[,;:> ]|(?:quad|qquad|enspace|space)(?![A-Za-z]))|~|\\[hv]space\*?\{[^{}]*\}"
    r"|\\phantom\{[^{}]*\}"
)
_SYNONYMS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge",
    "geqslant": "ge", "neq": "ne", "times": "cdot", "ast": "cdot", "lt": "<", "gt": ">",
    "dots": "ldots", "cdots": "ldots", "dotsc": "ldots", "lbrace": "{", "rbrace": "}",
    "varnothing": "emptyset", "O": "emptyset", "lvert": "|", "rvert": "|", "vert": "|",
    "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "land": "wedge", "colon": ":",
    "pounds": "sterling", "backslash": "setminus", "smallsetminus": "setminus", "tbinom": "binom",
    "dbinom": "binom", "varepsilon": "epsilon", "vartheta": "theta", "varphi": "phi",
    "infin": "infty", "implies": "Rightarrow", "bar": "overline", "dotso": "ldots", "lor": "vee",
}  # fmt: skip
_CIS = re.compile(r"\\(?:text\s*\{\s*cis\s*\}|cis(?![A-Za-z]))\s*(.+)$")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
# Not `sec`, `min`, `max`, `cup`, `pm`: plain words that are rarely mathematics.
_FUNCTIONS = [
    "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot",
    "csc", "log", "ln", "exp", "gcd", "lcm",
]  # fmt: skip
_PLAIN_NAMES = {
    **{name: f"\\{name}" for name in (*_FUNCTIONS, "pi", "infty")},
    **{name: f"\\{name}" for name in _GREEK if len(name) > 3},
    "infinity": r"\infty", "inf": r"\infty", "oo": r"\infty", "union": r"\cup",
    "asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan",
}  # fmt: skip
_PLAIN = re.compile(
    rf"(?<![A-Za-z\\])({'|'.join(sorted(_PLAIN_NAMES, key=len, reverse=True))})(?![A-Za-z])"
)
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:,\d{3})+)(?![\d,])")
_SPACED_THOUSANDS = re.compile(
    r"(?<![\d.,}^_/] )(?<![\d.,}^_/])(\d{1,3})((?: \d{3})+)(?![\d/]| \d)"
)
_SCIENTIFIC = re.compile(r"(?<![A-Za-z\d.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d+)(?![A-Za-z\d.])")
_DEEP = r"\{[^{}]*\}"
for _ in range(5):
    _DEEP = r"\{(?:[^{}]|" + _DEEP + r")*\}"
_PAIR = re.compile(rf"\s*({_DEEP}|\d|[A-Za-z]|\\pi)\s*({_DEEP}|\d|[A-Za-z]|\\pi)")
_SQRT_PLAIN = re.compile(r"(?<![A-Za-z\\])sqrt(?![A-Za-z])")


ROW_END = "\x01"
"""Marks the end of a matrix row."""


def canonical(text: str) -> str:
    """The text in canonical notation. White space becomes single spaces."""
    text = _in_ascii(text)
    text = _without_layout(text)
    text = _commands(text)
    text = _plain_text(text)
    text = _arguments(text)
    text = _numbers(text)
    return re.sub(r"\s+", " ", text).strip()


def _in_ascii(text: str) -> str:
    """Unicode signs, digits, fractions and powers as LaTeX."""
    text = _runs(text, _SUPERSCRIPTS, "^")
    text = _runs(text, _SUBSCRIPTS, "_")
    written: list[str] = []
    for sign in text:
        if sign in _SIGNS:
            written.append(_SIGNS[sign])
        elif ord(sign) < 128:
            written.append(sign)
        elif unicodedata.category(sign) == "No" and "\u2044" in unicodedata.normalize("NFKC", sign):
            over, under = unicodedata.normalize("NFKC", sign).split("\u2044")
            written.append(rf"\frac{{{over}}}{{{under}}}")
        elif unicodedata.category(sign) == "Nd":
            written.append(str(unicodedata.decimal(sign)))
        else:
            written.append(unicodedata.normalize("NFKC", sign))
    return "".join(written)


def _runs(text: str, signs: dict[str, str], mark: str) -> str:
    """Replace each run of superscript or subscript digits by `mark{...}`."""
    return re.sub(
        f"[{''.join(signs)}]+", lambda run: f"{mark}{{{''.join(signs[s] for s in run[0])}}}", text
    )


def _without_layout(text: str) -> str:
    """Remove delimiters of mathematics and Markdown, and layout commands."""
    if r"\begin" not in text:
        text = text.replace("\\\\", "\\")  # escaped twice
    text = re.sub(r"\\\\(?:\[-?[\d.]+ *[a-z]+\])?", ROW_END, text)
    text = re.sub(r"(?<=\d)(?:,\\!|\{,\})\s*(?=\d{3})", "", text)
    text = text.replace(r"\$", r"\dollar ").replace(r"\%", r"\percent ").replace("%", r"\percent ")
    if text.count("$") % 2:  # one of them is a dollar sign
        text = re.sub(r"\$(?=\s*-?\s*[\d.])", r"\\dollar ", text, count=1)
    text = text.replace("$", " ")
    text = re.sub(r"\\[()\[\]]", " ", text)
    text = re.sub(r"(?<![\w*])\*\*(?!\s)([^*]+?)(?<!\s)\*\*(?![\w*])", r"\1", text)
    text = re.sub(r"(?<![\w`])`([^`]+)`(?![\w`])", r"\1", text)
    text = text.replace(r"\!", "").replace("{,}", ",")
    return _NO_INK.sub("", _SPACES.sub(" ", text))


def _commands(text: str) -> str:
    """Replace synonyms of commands by one name, and all text commands by `\\text`."""
    text = _COMMAND.sub(_synonym, text)
    text = re.sub(r"\\R(?![A-Za-z])", r"\\mathbb{R}", text)
    text = re.sub(r"\\mathbb\s*\{?\s*([A-Z])\s*\}?", r"\\mathbb{\1}", text)
    for _ in range(3):  # nested commands
        text = re.sub(rf"\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}", r"\\text{\1}", text)
    text = re.sub(r"\\text\s*\{([^{}]*)\}", _words, text)
    text = _CIS.sub(r"(\\cos(\1)+i\\sin(\1))", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\degree ", text)
    text = re.sub(r"\\degree\s*(?:\\text\{)?\s*([CF])(?![A-Za-z])\s*\}?", r" \\text{deg\1}", text)
    return re.sub(r"\\text\{\s*\}", " ", text)


def _synonym(command: "re.Match[str]") -> str:
    name = _SYNONYMS.get(command[1])
    if name is None:
        return command[0]
    return f"\\{name}" if name.isalpha() or name in "{}" else name


def _words(command: "re.Match[str]") -> str:
    """Keep words in `\\text{}`; unwrap symbols, and numbers with their units."""
    content = command[1].strip()
    if re.fullmatch(r"(?:and|or|,|;|\s)+", content, re.IGNORECASE):
        return f" {content} "
    if not re.search(r"[A-Za-z]{2}", content) and not re.fullmatch(r"[A-Za-z]\.?", content):
        return f" {content} "  # \text{9}, \text{(C)}
    if content in ("e", "i"):
        return content
    if re.match(r"[-+]?[\d.(\\]", content) and not re.match(r"[\d:]+ ?[ap]\.?m", content, re.I):
        return f" {content} "  # \text{18 eggs}
    return rf" \text{{{content}}} "


def _plain_text(text: str) -> str:
    """Replace plain-text operators and names by LaTeX commands."""
    text = _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", text)
    text = re.sub(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\cdot ", text)
    text = re.sub(r"<=|=<", r"\\le ", text)
    text = re.sub(r">=|=>", r"\\ge ", text)
    text = text.replace("!=", r"\ne ").replace("+/-", r"\pm ").replace("+-", r"\pm ")
    text = text.replace("**", "^").replace("*", r"\cdot ").replace("...", r"\ldots ")
    text = _SQRT_PLAIN.sub(r"\\sqrt", text)
    text = re.sub(r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup ", text)
    text = re.sub(
        r"(?<=[\d}])\s*(?:\\text\{)?(?:percent|per cent|pct)(?![A-Za-z])\}?", r"\\percent ", text
    )
    return _outside_words(text, lambda part: _PLAIN.sub(lambda m: f" {_PLAIN_NAMES[m[1]]} ", part))


def _outside_words(text: str, change: Callable[[str], str]) -> str:
    parts = re.split(r"(\\text\{[^{}]*\})", text)
    return "".join(part if part.startswith(r"\text{") else change(part) for part in parts)


def _arguments(text: str) -> str:
    r"""Put braces around every argument: `\frac12`, `\sqrt2`, `x^10`, `\sqrt(3)`, `2^(n+1)`."""
    text = re.sub(r"\s*([\^_])\s*", r"\1", text)
    text = re.sub(r"([\^_])\(([^()]*)\)", r"\1{\2}", text)
    # x^1/3 means (x^1)/3, as in LaTeX and calculators.
    text = re.sub(r"\^([-+]?\d+(?:\.\d+)?|[-+]?[A-Za-z]|\\[A-Za-z]+(?!\s*\{))", r"^{\1}", text)
    text = re.sub(r"_(\d+|[A-Za-z])", r"_{\1}", text)
    text = re.sub(r"\\sqrt\s*(\[[^\[\]]*\])?\s*\(", lambda m: f"\\sqrt{m[1] or ''}(", text)
    text = _bracketed_argument(text)
    text = re.sub(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d+|[A-Za-z]|\\[A-Za-z]+)", r"\\sqrt\1{\2}", text)
    for command in reversed(list(re.finditer(r"\\(?:frac|binom)(?![A-Za-z])", text))):
        pair = _PAIR.match(text, command.end())
        if pair is not None:
            pair_text = _braced(pair[1]) + _braced(pair[2])
            text = f"{text[: command.end()]}{pair_text}{text[pair.end() :]}"
    return text


def _braced(argument: str) -> str:
    return argument if argument.startswith("{") else f"{{{argument}}}"


def _bracketed_argument(text: str) -> str:
    r"""Replace the brackets of `\sqrt(...)` by braces."""
    for root in reversed(list(re.finditer(r"\\sqrt(?:\[[^\[\]]*\])?\(", text))):
        depth = 0
        for place in range(root.end() - 1, len(text)):
            depth += (text[place] == "(") - (text[place] == ")")
            if depth == 0:
                text = f"{text[: root.end() - 1]}{{{text[root.end() : place]}}}{text[place + 1 :]}"
                break
    return text


def _numbers(text: str) -> str:
    """Convert mixed numbers, repeating decimals and thousands separated by spaces."""
    text = _SPACED_THOUSANDS.sub(lambda m: m[1] + m[2].replace(" ", ""), text)
    text = re.sub(r"(?<![\d./}^_])(\d+)\s+(\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}", text)
    return re.sub(r"(\d*)\.(\d*)\\overline\{(\d+)\}", _repeating, text)


def _repeating(decimal: "re.Match[str]") -> str:
    """A repeating decimal as a fraction: 0.1\\overline{6} = (16 - 1) / 90."""
    whole, fixed, repeated = decimal[1] or "0", decimal[2], decimal[3]
    over = int(whole + fixed + repeated) - int(whole + fixed)
    under = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"\frac{{{over}}}{{{under}}}"


def without_thousands(text: str) -> str:
    """The text without commas between groups of three digits."""
    return _THOUSANDS.sub(lambda number: number[1] + number[2].replace(",", ""), text)
