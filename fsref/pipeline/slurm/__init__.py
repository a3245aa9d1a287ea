"""A run as a job on a Slurm cluster: rendering and submitting it, and what runs inside it.

``plan`` and ``script`` make the job's files, ``submit`` hands them over. Inside the job, ``job`` is the launcher of the whole (it starts
``steps`` with srun), ``node`` the launcher of one inference node, ``rank`` what becomes a trainer rank. ``attempts`` knows which starts
of a run there were, and says on Slurm's word that their processes are gone. ``commands`` alone runs Slurm's programs.
"""
