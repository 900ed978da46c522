"""The paged cache: writing keys and values into pages, and keeping an anchor for each page."""
