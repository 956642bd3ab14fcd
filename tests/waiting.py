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
