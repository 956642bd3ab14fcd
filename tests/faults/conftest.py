"Small disks to write runs and checkpoints to."
import os
import subprocess
import time

import pytest


@pytest.fixture
def disk(tmp_path):
    "Mounts a small file system, of 4 MB if nothing else is said; asked again for one of that name, gives it other limits. Skips where this user may not mount."
    made = []

    def mount(name="disk", **options):
        place, words = tmp_path / name, ",".join(k if v is True else f"{k}={v}" for k, v in options.items())
        place.mkdir(exist_ok=True)
        there = os.path.ismount(place)
        how = ["-o", f"remount,{words}"] if there else ["-t", "tmpfs", "-o", words or "size=4m", "tmpfs"]
        for _ in range(200):
            try: done = subprocess.run(["mount", *how, place], capture_output=True, text=True)
            except FileNotFoundError: pytest.skip("there is no mount here")
            if not (there and done.returncode and "busy" in done.stderr): break
            time.sleep(.05)   # a rank has a file of it open for writing
        assert not (there and done.returncode), done.stderr  # once a disk could be mounted, its limits can be changed too
        if done.returncode: pytest.skip(f"a file system can't be mounted here (needs root): {done.stderr.strip()}")
        if not there: made.append(place)
        return place
    yield mount
    for place in made: subprocess.run(["umount", "-l", place], check=True)
