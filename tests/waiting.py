"Waiting for what another process or thread does."
import time


def within(seconds, every=.05):
    "`until(condition)`: wait for a condition and give back what it gave; it fails after `seconds`, or after those that a call names"
    def until(condition, timeout=seconds):
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if found := condition(): return found
            time.sleep(every)
        raise AssertionError(f"not within {timeout} s")
    return until


def word(rundir):
    "The file by which a test gives ranks that wait for its word that word; beside the run's folder, in which there is only what the run wrote"
    return rundir.path.with_name(f"{rundir.path.name}.told")
