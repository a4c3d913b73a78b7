"""JSON schemas of the parts of Kubernetes' resources that `launchers/` uses; a field that is not here is an error.

From the custom resource definitions of JobSet (v1alpha2), Kubeflow Trainer (v1alpha1, v2.2) and KubeRay (v1).
"""

from typing import Any

Schema = dict[str, Any]
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": r"^\d+(\.\d+)?(m|[KMGTPE]i?)?$"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}


def record(required: str = "", **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": {name.rstrip("_"): value for name, value in properties.items()},
        "required": required.split(),
        "additionalProperties": False,
    }


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def resource(group: str, kind: str, spec: Schema) -> Schema:
    metadata = record("name", name=NAME, labels=LABELS)
    return record(
        "apiVersion kind metadata spec",
        apiVersion={"const": group},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


ENVIRONMENT = many(record("name value", name={"type": "string", "pattern": "^[A-Z][A-Z0-9_]*$"}, value=TEXT))
RESOURCES = record("limits", limits={"type": "object", "additionalProperties": QUANTITY, "minProperties": 1})
CONTAINER = record(
    "name",
    name=NAME,
    image=TEXT,
    workingDir={"type": "string", "pattern": "^/"},
    command=many(TEXT),
    env=ENVIRONMENT,
    ports=many(record("containerPort", containerPort={"type": "integer", "minimum": 1, "maximum": 65535})),
    resources=RESOURCES,
    volumeMounts=many(
        record(
            "name mountPath", name=NAME, mountPath={"type": "string", "pattern": "^/"}, readOnly={"type": "boolean"}
        )
    ),
)
VOLUME = {
    "oneOf": [
        record("name emptyDir", name=NAME, emptyDir=record("", medium={"const": "Memory"}, sizeLimit=QUANTITY)),
        record("name persistentVolumeClaim", name=NAME, persistentVolumeClaim=record("claimName", claimName=NAME)),
    ]
}
POD = record(
    "containers",
    containers=many(CONTAINER),
    volumes=many(VOLUME),
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    terminationGracePeriodSeconds=COUNT,
)
POD_TEMPLATE = record("spec", spec=POD)
JOB = record(
    "template",
    parallelism=COUNT,
    completions=COUNT,
    completionMode={"enum": ["NonIndexed", "Indexed"]},
    backoffLimit=COUNT,
    successPolicy=record("rules", rules=many(record("succeededIndexes", succeededIndexes=TEXT))),
    template=POD_TEMPLATE,
)
JOB_SET_SPEC = record(
    "replicatedJobs",
    failurePolicy=record("maxRestarts", maxRestarts=COUNT),
    replicatedJobs=many(
        record(
            "name template",
            name=NAME,
            replicas=COUNT,
            template=record("spec", metadata=record("labels", labels=LABELS), spec=JOB),
        )
    ),
)
RAY_PARAMETERS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}

SCHEMAS = {
    "JobSet": resource("jobset.x-k8s.io/v1alpha2", "JobSet", JOB_SET_SPEC),
    "TrainJob": resource(
        "trainer.kubeflow.org/v1alpha1",
        "TrainJob",
        record(
            "runtimeRef",
            runtimeRef=record("name", name=NAME, kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]}),
            trainer=record(
                "", numNodes=COUNT, image=TEXT, command=many(TEXT), env=ENVIRONMENT, resourcesPerNode=RESOURCES
            ),
        ),
    ),
    "TrainingRuntime": resource(
        "trainer.kubeflow.org/v1alpha1",
        "TrainingRuntime",
        record(
            "template",
            mlPolicy=record("", numNodes=COUNT, torch=record()),
            template=record("spec", spec=JOB_SET_SPEC),
        ),
    ),
    "RayJob": resource(
        "ray.io/v1",
        "RayJob",
        record(
            "entrypoint rayClusterSpec",
            entrypoint=TEXT,
            shutdownAfterJobFinishes={"type": "boolean"},
            ttlSecondsAfterFinished=COUNT,
            backoffLimit=COUNT,
            rayClusterSpec=record(
                "headGroupSpec",
                rayVersion=TEXT,
                enableInTreeAutoscaling={"type": "boolean"},
                headGroupSpec=record("template", rayStartParams=RAY_PARAMETERS, template=POD_TEMPLATE),
                workerGroupSpecs=many(
                    record(
                        "groupName minReplicas maxReplicas template",
                        groupName=NAME,
                        replicas=COUNT,
                        minReplicas=COUNT,
                        maxReplicas=COUNT,
                        rayStartParams=RAY_PARAMETERS,
                        template=POD_TEMPLATE,
                    )
                ),
            ),
        ),
    ),
}
"""By the kind of the resource."""
