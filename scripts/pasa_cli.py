"""Start the command line with settings that must stand before torch is loaded: the console script `pasa` is here."""

import io
import os
import shutil
import signal
import sys


def main() -> None:
    """Run the command line with OpenMP threads that sleep while they wait, and without bars of other packages.

    By default they spin. On a busy machine that made the emulation ten times slower (two cores at a load of 6: 1.6 s
    a call instead of 0.16). The module lies outside of the package, because importing the package loads torch.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TQDM_DISABLE", "1")
    if os.environ.get("NO_COLOR"):  # rich would keep bold, dim and bars; at a dumb terminal it also ignores the width
        width, height = shutil.get_terminal_size()
        os.environ |= {"TERM": "dumb", "COLUMNS": str(width), "LINES": str(height)}
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may be no text, and a terminal may know ASCII alone
            stream.reconfigure(errors="backslashreplace")
    stops: list[int] = []

    def stop(number: int, frame: object) -> None:
        stops.append(number)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, stop)
        from pasa.eval.cli import main as run

        if stops:  # some module that was loaded has caught the interrupt, and the command would go on
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, before)
        run()
    except (KeyboardInterrupt, Exception) as error:
        if not stops and not isinstance(error, KeyboardInterrupt):
            raise
        # While modules load, which takes seconds; half of a module may fail in its own way. A command has a message
        # that says more.
        print("pasa: stopped; nothing was written", file=sys.stderr)
        sys.exit(130)


def restart() -> None:
    """Start `python -m pasa` again, with threads that sleep, unless OMP_WAIT_POLICY is set.

    Python imports the package, and so torch, before the first line of ours runs. At a load of 10 on two cores the
    threads, which spin, took 80 s for 25 s of work. Starting again costs the seconds in which torch loads.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
