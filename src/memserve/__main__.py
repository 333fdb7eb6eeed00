"""``python -m memserve`` is ``memserve`` (level 4)."""

from memserve.cli.main import main

if __name__ == "__main__":
    main()
