"The docs site builds (its first build fetches three files of JavaScript), loads nothing from elsewhere, names every public name, and can be read by everyone: links, headings, pictures, contrast, phones, search."
import html
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lab import ARTIFACTS, ROOT

sys.path.insert(0, str(ROOT / "docs"))
from pages import modules, public_names  # noqa: E402

pytestmark = pytest.mark.browser
CONTRAST = re.sub(r"^//.*\n", "", (Path(__file__).parent / "contrast.js").read_text())
SEEN = ("index", "first_sharded_finetune", "errors", "choosing", "memory", "recipe_fields")   # pages of which a picture is kept


class Seen(HTMLParser):
    "Headings, pictures, ids and visible text of a page"
    def __init__(self, text):
        super().__init__()
        self.headings, self.alts, self.ids, self.words, self._mute = [], [], set(), [], 0
        self.feed(text)
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if re.fullmatch("h[1-6]", tag): self.headings.append(int(tag[1]))
        if tag == "img": self.alts.append((a.get("alt") or "", a.get("src", "")[:60]))
        if a.get("id"): self.ids.add(a["id"])
        self._mute += tag in ("script", "style")
    def handle_endtag(self, tag): self._mute -= tag in ("script", "style")
    def handle_data(self, data):
        if not self._mute: self.words.append(data)


@pytest.fixture(scope="module")
def pages(site): return {str(p.relative_to(site).with_suffix("")): Seen(p.read_text()) for p in sorted(site.rglob("*.html"))}


def test_every_module_has_a_page(site, pages):
    modules = {f"{p.parent.name}/{p.stem}" for p in (ROOT / "shardnb").rglob("*.py") if p.stem not in ("__init__", "_modidx", "__main__")}
    assert modules <= set(pages), sorted(modules - set(pages))
    assert {"index", "tutorials/first_sharded_finetune", "explanations/errors", "recipe_fields", "options", "reference", "changelog"} <= set(pages)


def test_the_reference_covers_every_public_name(pages):
    "Functions and classes by an anchor on their module's page, constants by their value in the list of names, where all are"
    import shardnb
    listed, missing, count = "".join(pages["reference"].words), [], 0
    for p in modules(ROOT):
        page = pages[f"{p.parent.name}/{p.stem}"]
        for n, made in public_names(p):
            count += 1
            there = n.lower() in page.ids if made else re.search(rf"\b{re.escape(n)}\b[^\n]*=", listed)
            if not there or not re.search(rf"\b{re.escape(n)}\b", listed): missing.append(f"{p.parent.name}.{p.stem}.{n}")
    assert count > 500 and not missing, missing
    assert not [n for n in shardnb.__all__ if f"shardnb.{n}" not in listed]


def test_every_recipe_field_magic_and_command_is_documented(site):
    from shardnb import Recipe
    from shardnb.plan.recipe import options_of
    from shardnb.ui.cli import COMMANDS
    from shardnb.ui.magics import ShardMagics
    text, options = (site / "recipe_fields.html").read_text(), html.unescape("".join(Seen((site / "options.html").read_text()).words))
    assert not [f for f in Recipe.model_fields if f">{f}<" not in text and f"{f}</" not in text]
    assert not [o.flags[0] for o in options_of() if o.flags[0] not in options]
    assert not [n for names in ShardMagics.magics.values() for n in names if f"%{n}" not in options] and not [c for c in COMMANDS if f"shardnb {c}" not in options]


def test_a_page_can_be_typed_as_it_is_shown(pages):
    "nbdev takes %load_ext out of what it shows; without it the first magic that a reader types isn't found"
    used = [f for d in ("tutorials", "explanations") for f in sorted((ROOT / "nbs" / d).glob("*.ipynb")) if "%load_ext shardnb" in f.read_text()]
    assert len(used) > 3 and not [f.name for f in used if "%load_ext shardnb" not in "".join(pages[f"{f.parent.name}/{re.sub(r'^[0-9]+[a-z]*_', '', f.stem)}"].words)]


def test_headings_are_in_order_and_pictures_are_described(pages):
    bad = []
    for name, p in pages.items():
        if name not in ("search", "genindex"):
            if p.headings.count(1) != 1: bad.append(f"{name}: {p.headings.count(1)} titles")
            bad += [f"{name}: h{b} below h{a}" for a, b in zip(p.headings, p.headings[1:]) if b > a + 1]
        bad += [f"{name}: {src} has no words" for alt, src in p.alts if len(alt) < 8 or re.search(r"\.(png|svg)$", alt)]
    assert not bad, bad[:20]


def looked(site, browser, files):
    "What a browser finds on pages that are opened as files: requests that leave, console errors, contrast in light and dark, sideways scrolling on a phone"
    ARTIFACTS.mkdir(exist_ok=True)
    context = browser.new_context(viewport=dict(width=1280, height=900), color_scheme="light")
    page, out = context.new_page(), dict(errors=[], left=[], faint=[], wide=[])
    page.on("console", lambda m: out["errors"].append(f"{page.url}: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda e: out["errors"].append(f"{page.url}: {e}"))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else out["left"].append(r.url))
    for f in files:
        name = f.relative_to(site)
        page.goto(f.as_uri(), wait_until="load")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            out["faint"] += [f"{name}, {scheme}: {x}" for x in page.evaluate(CONTRAST)]
            if f.stem in SEEN: page.screenshot(path=ARTIFACTS / f"docs-{f.stem}-{scheme}.png")
        page.set_viewport_size(dict(width=390, height=844))
        page.emulate_media(color_scheme="light")
        if (wide := page.evaluate("document.documentElement.scrollWidth")) > 390: out["wide"].append(f"{name}: {wide} px")
        if f.stem in SEEN: page.screenshot(path=ARTIFACTS / f"docs-{f.stem}-phone.png")
        page.set_viewport_size(dict(width=1280, height=900))
    context.close()
    return out


@pytest.fixture(scope="module")
def told(site, browser):
    "Every guide, and every sixth of the modules' pages, which are all made alike"
    files = sorted(site.rglob("*.html"))
    modules = [f for f in files if f.parent.name in ("plan", "run", "ui")]
    return looked(site, browser, [f for f in files if f not in modules or f.stem in SEEN or modules.index(f) % 6 == 0])


@pytest.mark.slow
def test_every_page(site, browser):
    found = looked(site, browser, sorted(site.rglob("*.html")))
    assert not any(found.values()), {k: v[:20] for k, v in found.items()}


def test_no_request_leaves_and_the_console_is_quiet(told): assert not told["left"] and not told["errors"], (told["left"][:5], told["errors"][:5])


def test_text_can_be_read_in_light_and_dark(told):
    "WCAG 2.2 AA: 4.5 for text, 3 for large text"
    assert not told["faint"], "\n".join(told["faint"][:40])


def test_a_phone_needs_no_sideways_scrolling(told): assert not told["wide"], told["wide"]


def test_search_works_without_a_server(site, browser):
    page, errors = browser.new_page(), []
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else errors.append(r.url))
    for words, where in (("zero3", "tutorials/"), ("deserializing header", "explanations/errors"), ("24 GB cards", "explanations/two_24gb_cards")):
        page.goto((site / "search.html").as_uri() + "?q=" + words.replace(" ", "+"))
        page.locator(f"#search-results li a[href*='{where}']").first.wait_for(timeout=20_000, state="attached")   # results come one by one
    page.close()
    assert not errors, errors[:5]
