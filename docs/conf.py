"Sphinx settings of the docs site: pages that need no network, MyST-NB over notebooks that are already executed, furo in light and dark."
project = "shardnb"
author = "The shardnb authors"
copyright = "2026, The shardnb authors"
html_title = "shardnb"
extensions = ["myst_nb", "sphinx_copybutton", "sphinx.ext.mathjax"]
nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_ipywidgets_js = {"require.js": {}, "embed-amd.js": {}}
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
# show_doc writes headings of the third level wherever it stands; a bundle's types that a page can't show are not an error, since another type is there too.
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]
mathjax_path = "tex-svg.js"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["shardnb.css"]
html_js_files = ["offline.js"]
html_show_sphinx = False
html_copy_source = False
master_doc = "index"
highlight_language = "none"   # of blocks that name no language: lines with magics, shell, texts
copybutton_exclude = ".linenos, .gp"
