if __name__ != "lousho_ray.stores":
    raise ImportError(f"import lousho_ray.stores, not {__name__}: two import names would mean two classes of everything in it")
