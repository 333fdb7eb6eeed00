"""``python -m memserve`` is ``memserve``."""

from memserve.cli.main import main

if __name__ == "__main__":
    main()
