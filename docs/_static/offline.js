// A page that is opened as a file may not fetch others, so the search shows titles without excerpts there.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
