"""`python -m refitd`. Children of the engine import this module first: they must end when the daemon does."""

# Before anything else: a child whose daemon dies during these imports must not stay behind.
from refitd import parent_death

parent_death.install_from_environment()

if __name__ == "__main__":
    from refitd.cli import main

    main()
