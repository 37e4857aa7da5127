"""`python -m golden.record`: write the golden plans, options and messages of the current tree."""

from __future__ import annotations

from golden.current import MESSAGES, OPTIONS, PLANS, load, messages, options, plans, save


def main() -> None:
    for path in PLANS.glob("*.json"):
        case = load(path)
        save(path, case | {"plans": plans(case)})
    save(OPTIONS, options())
    save(MESSAGES, messages())


if __name__ == "__main__":
    main()
