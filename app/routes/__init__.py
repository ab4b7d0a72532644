"""The routes of API v1; they translate and do not compute."""
