"""From a reference to a converted image: fetched, compared with its listing, decoded, watched."""
