"""Looking into a run: which run is meant (``find``), what a step, an object or the run holds (``report``), pictures of it (``plot``).
Reads only.
"""
