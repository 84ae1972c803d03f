"""`python -m refitd`. Children of the engine run this file first: they must end when the daemon does."""

# Before anything else: a child whose daemon dies during these imports must not stay behind.
from refitd import parent_death

parent_death.install_from_environment()

if __name__ == "__main__":
    # multiprocessing does not re-import a main module named "package.__main__" in spawned children, and so the line
    # above would never run there; without a spec it goes by the file.
    __spec__ = None

    from refitd.cli import main

    main()
