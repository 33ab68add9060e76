"""Runs the PTX of a kernel's inline assembly for one warp whose threads go the same way, so far as the tests need it."""

import functools
import re

#: What compares two numbers in `setp`.
_COMPARE = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
#: What computes integers of others.
_COMPUTE = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "mad": lambda a, b, c: a * b + c,
    "min": min, "xor": lambda a, b: a ^ b, "and": lambda a, b: a & b, "shr": lambda a, b: a >> b,
    "shl": lambda a, b: a << b,
}  # fmt: skip
#: What is arithmetic of integers.
_INTEGER = ("mov", "cvt", "cvta", *_COMPUTE)
#: Where shared memory begins.
_GIVEN = {"global_smem": 0}


@functools.cache
def number(text):
    """The number that an operand is, or None."""
    return int(text, 0) if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", text) else None


class Program:
    """Statements with their registers and labels found in the scopes around them.

    Args:
        text: the assembly.
    """

    def __init__(self, text):
        self.statements, self.table, labels = [], [], {}
        scopes, count, held = [((), {})], 0, ""
        depth = 0
        for char in text:
            if depth or (char == "{" and held.strip()):
                # Braces within a statement hold a list of operands.
                depth += (char == "{") - (char == "}")
                held += char
            elif char == "{":
                count += 1
                scopes.append(((*scopes[-1][0], count), dict(scopes[-1][1])))
            elif char == "}":
                assert not held.strip(), held
                scopes.pop()
            elif char == ":" and re.fullmatch(r"\w+", held.strip()):
                labels[scopes[-1][0], held.strip()] = len(self.statements)
                held = ""
            elif char == ";":
                self._add(held.strip(), *scopes[-1])
                held = ""
            else:
                held += char
        assert not held.strip(), held
        assert not depth
        self.targets = {
            at: [
                next(labels[path[:i], name] for i in range(len(path), -1, -1) if (path[:i], name) in labels)
                for name in names
            ]
            for at, (*_, path, names) in enumerate(self.statements)
        }

    def _add(self, statement, path, registers):
        if statement.startswith(".reg"):
            for name, count in re.findall(r"(\w+)(?:<(\d+)>)?", statement.split(None, 2)[2]):
                for each in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                    registers[each] = f"{each}.{'.'.join(map(str, path))}"
            return
        if statement.startswith(".branchtargets"):
            # Of the branch behind it.
            self.table = re.findall(r"\w+", statement)[1:]
            return
        predicate, statement = re.fullmatch(r"(?:@(!?\w+)\s+)?(.*)", statement, re.DOTALL).groups()
        if predicate:
            sign, name = ("!", predicate[1:]) if predicate[0] == "!" else ("", predicate)
            predicate = sign + registers[name]
        code, *rest = statement.split()
        names = {"bra": rest, "brx": self.table}.get(code.split(".")[0], [])
        if code.split(".")[0] != "bra":
            code, _, operands = statement.partition(" ")
            operands = re.sub(
                r"(?<![\w.$%:])[a-z_]\w*", lambda found: registers.get(found[0], found[0]), operands
            )
            statement = f"{code} {operands}"
        code, _, operands = statement.partition(" ")
        operands = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", operands) or [""]
        self.statements.append((predicate, code, [each.strip() for each in operands], path, names))

    def run(self, operands, machine):
        """Run it.

        Args:
            operands: the values of $0, $1, and so on, of which those that are written change.
            machine: `machine.ptx(code, arguments, value)` runs what is no arithmetic of integers. It may give a register
                back, or several, and their value; or a dictionary of registers with a value each. `machine.thread` is
                the number of the warp's first thread.
        """
        registers, at = {"%tid.x": machine.thread}, 0

        def value(text):
            text = text.strip()
            if text.startswith("$"):
                return operands[int(text[1:])]
            found = number(text)
            return registers.get(text, _GIVEN.get(text, text)) if found is None else found

        def write(register, result):
            if register.startswith("$"):
                operands[int(register[1:])] = result
            else:
                registers[register] = result

        while at < len(self.statements):
            predicate, code, (to, *given), _, names = self.statements[at]
            at += 1
            if predicate and registers[predicate.lstrip("!")] == predicate.startswith("!"):
                continue
            if names:
                at = self.targets[at - 1][value(to) if code.startswith("brx") else 0]
                continue
            kind = code.split(".")[0]
            if kind == "setp":
                _, compare, *more = code.split(".")
                found = _COMPARE[compare](value(given[0]), value(given[1]))
                registers[to] = found and (more[0] != "and" or value(given[2]))
            elif kind in _INTEGER and not code.endswith(".f32"):
                write(to, self._computed(kind, [value(each) for each in given], value))
            else:
                found = machine.ptx(code, [to, *given], value) or {}
                if not isinstance(found, dict):
                    to, result = found
                    found = dict.fromkeys(to if isinstance(to, list) else [to], result)
                for register, result in found.items():
                    write(register, result)

    @staticmethod
    def _computed(kind, values, value):
        if kind == "mov" and isinstance(values[0], str) and values[0].startswith("{"):
            return value(values[0].strip("{}").split(",")[0])
        if kind in ("mov", "cvt", "cvta"):
            return values[0]
        return _COMPUTE[kind](*values)
