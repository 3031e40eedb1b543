if __name__ != "lousho_ray.actors":
    raise ImportError(f"import lousho_ray.actors, not {__name__}: two import names would mean two classes of everything in it")
