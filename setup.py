"Reads settings.ini, the one source of version, requirements and extras, and hands them to setuptools."
import configparser
from pathlib import Path

from setuptools import find_packages, setup

ini = configparser.ConfigParser(delimiters=["="], interpolation=None)
ini.read(Path(__file__).parent / "settings.ini", encoding="utf-8")
s = ini["DEFAULT"]
extras = {k.removesuffix("_requirements"): v.split() for k, v in s.items() if k.endswith("_requirements")}
setup(
    version=s["version"],
    packages=find_packages(include=[s["lib_path"], s["lib_path"] + ".*"]),
    install_requires=s["requirements"].split(),
    extras_require=extras,
    entry_points={"nbdev": [f"{s['lib_path']}={s['lib_path']}._modidx:d"], "console_scripts": ["shardnb=shardnb.ui.cli:main"]},
)
