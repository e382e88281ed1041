"""Collects the error messages of the Python package, of the C library and of the program from their
sources. Holes, such as names and numbers, are written as '…'."""

import ast
import re

HOLE = "…"
_PREFIX = re.compile(r"^halfstep: ")
# A message with fewer letters of its own than this is made from texts that stand elsewhere.
_LETTERS = 12
# Calls that make an exception from a code of the library: their texts are the library's.
_FORWARDED = {HOLE, f"{HOLE}: {HOLE}"}


def _letters(text):
    return len(re.findall(r"[A-Za-z]", _PREFIX.sub("", text)))


def normal(text):
    """Returns a message in the form in which two are compared: without quotes around holes, and
    with one hole for several in a row."""
    text = re.sub(rf"{HOLE}+", HOLE, " ".join(text.split()))
    text = re.sub(rf"[\"']({HOLE})[\"']", r"\1", text)
    text = re.sub(r"^halfstep_[a-z_]+(?=: )", HOLE, text)
    text = re.sub(rf"{HOLE}(?:[\s,x×/.:()]*{HOLE})+", HOLE, text)
    return _PREFIX.sub("", text).strip()


class _Module:
    """The functions of one module, and which calls them with which arguments."""

    def __init__(self, tree):
        self.outer = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.outer[child] = node
        self.calls = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self.calls.setdefault(_called(node), []).append(node)
        self.functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }
        self.constants = [node for node in tree.body if isinstance(node, ast.Assign)]

    def function(self, node):
        """Returns the function around a node, or None."""
        while node in self.outer:
            node = self.outer[node]
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                return node
        return None


def _called(call):
    """Returns the name of the function that is called."""
    function = call.func
    return getattr(function, "id", None) or getattr(function, "attr", "")


def _assigned(body, name):
    """Returns the expressions that are assigned to a name."""
    found = []
    for node in body:
        if isinstance(node, ast.Assign):
            if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                found.append(node.value)
    return found


def _argument(call, function, name):
    """Returns what a call gives for a parameter, or None."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    names = [one.arg for one in function.args.args]
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    place = names.index(name) if name in names else len(call.args)
    return call.args[place] if place < len(call.args) else None


def _name(node, module, depth):
    """Returns the texts that a variable can have: those assigned in its function, or those that
    callers give."""
    function = module.function(node)
    while function is not None:
        body = ast.walk(function)
        values = [] if isinstance(function, ast.Lambda) else _assigned(body, node.id)
        if values:
            return [text for v in values for text in _texts(v, module, depth + 1)]
        if node.id in [one.arg for one in function.args.args + function.args.kwonlyargs]:
            calls = module.calls.get(getattr(function, "name", ""), [])
            given = [_argument(call, function, node.id) for call in calls]
            found = [t for g in given if g is not None for t in _texts(g, module, depth + 1)]
            return [text for text in found if text != HOLE] or [HOLE]
        function = module.function(function)
    values = _assigned(module.constants, node.id)
    return [text for v in values for text in _texts(v, module, depth + 1)] or [HOLE]


def _texts(node, module, depth=0):
    """Returns the texts that an expression can have. A variable is a hole, unless the text has no
    words beside it."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else [HOLE]
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else part for part in node.values]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        texts = _texts(node.left, module, depth)
        return [a + b for a in texts for b in _texts(node.right, module, depth)]
    elif isinstance(node, ast.IfExp):
        return _texts(node.body, module, depth) + _texts(node.orelse, module, depth)
    elif isinstance(node, ast.Name) and depth < 4:
        return _name(node, module, depth)
    elif isinstance(node, ast.Call) and _called(node) in module.functions and depth < 4:
        function = module.functions[_called(node)]
        values = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
        return [text for v in values for text in _texts(v, module, depth + 1)] or [HOLE]
    else:
        return [HOLE]
    plain = "".join(part if isinstance(part, str) else HOLE for part in parts)
    if _letters(plain) >= _LETTERS:
        return [plain]
    texts = [""]
    for part in parts:
        inner = getattr(part, "value", part)
        new = [part] if isinstance(part, str) else _texts(inner, module, depth + 1)
        texts = [a + b for a in texts for b in new]
    return texts


def of_package(folder):
    """Returns {message: [place]} of all errors that modules in a folder make."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = _Module(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if re.search(r"(Error|Exception)$", _called(node)):
                texts = _texts(node.args[0], module)
            elif _called(node) == "check":  # it raises the error of a code, with this detail
                details = [one.value for one in node.keywords if one.arg == "detail"]
                texts = [t for d in details for t in _texts(d, module) if _letters(t) >= _LETTERS]
            else:
                continue
            for text in texts:
                if normal(text) not in _FORWARDED:
                    place = f"{path.relative_to(folder)}:{node.lineno}"
                    found.setdefault(text, []).append(place)
    return found


# ---- C -----------------------------------------------------------------------------------------

# Calls that write an error text: the first string after their first argument is the format.
_C_CALLS = re.compile(
    r"\b(?:(?:hstep_fail|hstep_cuda_fail|fail|run_fail|failure|complain|usage_error|refuse)"
    r"\s*\(|snprintf\((?=(?:m->)?error,)|fprintf\((?=stderr,))"
)
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
# A row of a table of errors, which holds a code and a text, and the text that several rows share.
_C_ROWS = re.compile(
    rf"(?:HALFSTEP_ERROR_[A-Z]+,\s*[01],|char lost\[\] =)((?:\s*{_LITERAL.pattern})+)"
)
_CONVERSION = re.compile(
    r"%[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh|h|ll|l|z|j|t)?[diouxXeEfgGcsp]"
)


def _code(text):
    """Returns C source without comments."""
    blank = lambda found: re.sub(r"[^\n]", " ", found.group())  # noqa: E731
    return re.sub(r"/\*.*?\*/", blank, text, flags=re.S)


def _arguments(code, start):
    """Returns the arguments of a call, whose parenthesis opens before `start`."""
    depth, quoted, begin, arguments, i = 1, False, start, [], start
    while depth and i < len(code):
        letter = code[i]
        if quoted:
            if letter == "\\":
                i += 1
            elif letter == '"':
                quoted = False
        elif letter == '"':
            quoted = True
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        if not quoted and (not depth or (depth == 1 and letter == ",")):
            arguments.append(code[begin:i])
            begin = i + 1
        i += 1
    return arguments


def _format(argument):
    """Returns the formats in an argument: one, or several after '?' and ':'."""
    argument = re.sub(r'"\s*PRI[a-zA-Z0-9]+\s*"', "d", argument.strip())
    argument = re.sub(r'"\s*PRI[a-zA-Z0-9]+$', 'd"', argument)
    argument = re.sub(r'"\s*[A-Z][A-Z0-9_]+\s*"', "%s", argument)
    argument = re.sub(r'"\s*[A-Z][A-Z0-9_]+$', '%s"', argument)
    argument = re.sub(r'^[A-Z][A-Z0-9_]+\s*"', '"%s', argument)
    argument = re.sub(r'"\s+"', "", argument)
    texts = []
    for text in _LITERAL.findall(argument):
        text = text.replace("%%", "\0")
        text = _CONVERSION.sub(HOLE, text).replace("\0", "%")
        texts.append(text.replace('\\"', '"').replace("\\n", " ").replace("\\\\", "\\"))
    return texts


def _is_message(text):
    """Returns True for a text of several words, or one with holes that has words of its own."""
    return " " in text.strip() and text[:1] not in ",:;" and _letters(normal(text)) > 3


def _formats(code):
    """Yields (place in the code, format) of each error text in a C file."""
    for row in _C_ROWS.finditer(code):
        for text in _format(row[1]):
            yield row.start(), text
    for call in _C_CALLS.finditer(code):
        if re.search(r"(?:int|void)\s+$", code[: call.start()][-12:]):
            continue  # a definition
        for argument in _arguments(code, call.end())[1:]:
            texts = _format(argument)
            found = [text for text in texts if _is_message(text)]
            for text in found:
                yield call.start(), text
            if found or (texts and call[0].startswith("snprintf")):
                break


def of_c(root, folders):
    """Returns {message: [place]} of all errors that C files in some folders make."""
    found = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.[ch]")):
            code = _code(path.read_text(encoding="utf-8"))
            for at, text in _formats(code):
                place = f"{path.relative_to(root)}:{code.count(chr(10), 0, at) + 1}"
                found.setdefault(text, []).append(place)
    return found
