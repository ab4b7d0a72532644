"""The demonstration: real photographs into a gallery, edited copies and strangers asked, every verdict printed."""
