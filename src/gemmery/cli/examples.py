"""The examples with which the help of each command ends."""

from __future__ import annotations

#: By the words of a command after `gemmery`. Each example is one line of a shell, and they run one after the other.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("gemmery doctor", "gemmery explain 512 14336 4096 --device H200"),
    "demo": ("gemmery demo", "gemmery demo --json demo.json"),
    "ladder": ("gemmery ladder", "gemmery ladder 1 2 --json rungs.json"),
    "doctor": ("gemmery doctor", "gemmery doctor --json findings.json"),
    "explain": (
        "gemmery explain 4096 4096 4096 --device H200 --top 3",
        "gemmery explain 16 28672 8192 --dtype fp16 --bias --json why.json",
        "gemmery explain 16 8192 8192 --device H200 --weight int4",
    ),
    "tune": (
        "gemmery tune --suite decode --seconds 600",
        "gemmery tune --shapes 16x28672x8192,64x4096x4096",
        "gemmery tune --from-log problems.jsonl",
    ),
    "warmup": ("gemmery warmup --model-shapes shapes.json --max-m 2048",),
    "predict": (
        "gemmery predict 512 28672 4096 --device H200",
        "gemmery predict 16 8192 8192 --device H200 --weight int4 --json time.json",
    ),
    "roofline": (
        "gemmery roofline --device H200",
        "gemmery roofline 16 4096 4096 8192 8192 8192 --device H200",
        "gemmery roofline --suite square --device H200 --out roofline.svg",
    ),
    "plot": (
        "gemmery bench --suite square --json square.json",
        "gemmery plot square.json --out square.svg",
    ),
    "inspect": (
        "gemmery inspect 4096 4096 4096 --device H200",
        "gemmery inspect 16 8192 8192 --target sm_80 --sass --json kernel.json",
    ),
    "order": (
        "gemmery order 2048 2048 2048 --device H200",
        "gemmery order 2048 2048 2048 --tile 128x128x64 --programs 64 --out order.svg",
    ),
    "indices": (
        "gemmery indices 100 70 40 --tile 64x64x32 --pid 3 --device A100 --edge 2",
        "gemmery indices 100 70 40 --tile 64x64x32 --pid 3 --out indices.svg",
    ),
    "lab": ("gemmery lab", "gemmery lab --export lab.html --gpu H200 --shapes 64x4096x4096"),
    "store": ("gemmery store show", "gemmery store export tuned.json", "gemmery store import tuned.json"),
    "store show": ("gemmery store show", "gemmery store show --json store.json"),
    "store export": (
        "gemmery store export tuned.json",
        "gemmery store export tuned.json --from-log problems.jsonl",
    ),
    "store import": ("gemmery store export tuned.json", "gemmery store import tuned.json"),
    "bench": (
        "gemmery bench --shapes 96x11008x4096,4096x11008x4096",
        "gemmery bench --list --suite square",
        "gemmery bench --suite square,llm --against cublas,compile --json .",
    ),
}


def epilog(command: str) -> str:
    """The end of a command's help, a paragraph for each line, since help joins the lines of a paragraph.

    Raises:
        KeyError: the command has no examples.
    """
    return "\n\n".join(("Examples:", *EXAMPLES[command]))
