"""A small folder in the format of MovieLens for the main job."""

import random
from pathlib import Path


def write(path: Path) -> Path:
    """Return the folder, with 80 users, 60 items and 4000 ratings. The parities of user and item decide each rating."""
    draw = random.Random(0)
    users = [f"{u}\t{draw.choice([1, 18, 25])}\t{draw.choice('MF')}\t{draw.randrange(5)}\t12345" for u in range(1, 81)]
    genres = ["Comedy", "Drama", "Film-Noir"]
    items = [
        f'{i}\t"Title" {i}, The\t{1990 + i % 7}\t{" ".join(draw.sample(genres, draw.randrange(3)))}'
        for i in range(1, 61)
    ]
    pairs = draw.sample([(u, i) for u in range(1, 81) for i in range(1, 61)], 4000)
    ratings = [f"{u}\t{i}\t{5 if (u + i) % 2 else 1}\t{978300000 + n}" for n, (u, i) in enumerate(pairs)]
    header = {
        "user": ("user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", users),
        "item": ("item_id:token\tmovie_title:token_seq\trelease_year:token\tgenre:token_seq", items),
        "inter": ("user_id:token\titem_id:token\trating:float\ttimestamp:float", ratings),
    }
    for name, (first, rows) in header.items():
        (path / f"ml-1m.{name}").write_text("\n".join([first, *rows]) + "\n")
    return path
