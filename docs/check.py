"Follows every link of the built site: pages, anchors and files must exist, and no page may load anything from elsewhere."
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("video", "src")}


class Page(HTMLParser):
    "Ids and references of one page"
    def __init__(self, text):
        super().__init__()
        self.ids, self.refs = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a[k] for k in ("id", "name") if a.get(k)}
        if a.get("rel") in ("canonical", "prev", "next"): return
        for key in ("href", "src"):
            if a.get(key): self.refs.append((tag, key, a[key]))


def problems(site):
    "One sentence for each broken link or outward load"
    site = Path(site).resolve()
    pages = {p: Page(p.read_text(encoding="utf-8")) for p in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        for tag, key, ref in page.refs:
            parts = urlsplit(ref)
            if parts.scheme == "data": continue
            if parts.scheme or parts.netloc:
                if (tag, key) in LOADS: found.append(f"{name}: <{tag}> loads {ref}")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir(): target = target / "index.html"
            if not target.exists(): found.append(f"{name}: {ref} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids: found.append(f"{name}: {ref} has no such anchor")
    return sorted(set(found))


if __name__ == "__main__":
    bad = problems(sys.argv[1] if len(sys.argv) > 1 else "_docs")
    print("\n".join(bad) or "no broken link")
    sys.exit(bool(bad))
