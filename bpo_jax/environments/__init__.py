"""Task families: each owns its games or problems, its protocol and its demonstrator."""
