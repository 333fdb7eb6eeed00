{{- define "memserve.labels" -}}
app.kubernetes.io/name: memserve
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "memserve.selector" -}}
app.kubernetes.io/name: memserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "memserve.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "memserve.secretName" -}}
{{ .Values.clusterSecret.existingSecret | default (printf "%s-cluster-secret" .Release.Name) }}
{{- end }}

{{- define "memserve.keysName" -}}
{{- if .Values.apiKeys.existingSecret }}{{ .Values.apiKeys.existingSecret }}{{ else if .Values.apiKeys.lines }}{{ .Release.Name }}-api-keys{{ end }}
{{- end }}

{{- define "memserve.usesEtcd" -}}
{{- if or .Values.etcd.enabled .Values.etcd.endpoints }}yes{{ end }}
{{- end }}

{{- define "memserve.etcdEndpoints" -}}
{{- if .Values.etcd.endpoints }}{{ join "," .Values.etcd.endpoints }}
{{- else }}
{{- $names := list }}
{{- range $at := until (int .Values.etcd.replicas) }}
{{- $names = append $names (printf "%s-etcd-%d.%s-etcd:2379" $.Release.Name $at $.Release.Name) }}
{{- end }}
{{- join "," $names }}
{{- end }}
{{- end }}

{{- /* Where a router may be, for --join. */ -}}
{{- define "memserve.join" -}}
{{- $names := list }}
{{- range $at := until (int .Values.router.replicas) }}
{{- $names = append $names (printf "%s-router-%d.%s-routers:7000" $.Release.Name $at $.Release.Name) }}
{{- end }}
{{- join "," $names }}
{{- end }}

{{- /* What clients may ask of a pod: that of a router, of any kind. */ -}}
{{- define "memserve.apiSelector" -}}
{{ include "memserve.selector" . }}
memserve/api: "true"
{{- end }}

{{- /* All models; the only one has no name. */ -}}
{{- define "memserve.models" -}}
{{- range .Values.models }}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?$" .name) }}
{{- fail (printf "models: %q is no name: lower case, digits and dashes, 30 characters at most" .name) }}
{{- end }}
{{- end }}
{{- toYaml (.Values.models | default (list (dict "source" .Values.model.source))) }}
{{- end }}

{{- /* Of a model's objects, behind the release's name; of its labels. */ -}}
{{- define "memserve.suffix" -}}
{{- with .name }}-{{ . }}{{ end }}
{{- end }}

{{- define "memserve.modelLabel" -}}
{{- with .name }}
memserve/model: {{ . }}
{{- end }}
{{- end }}

{{- /* What --model says of it. */ -}}
{{- define "memserve.modelWord" -}}
{{- with .name }}{{ . }}={{ end }}{{ .source }}
{{- end }}

{{- define "memserve.scheme" -}}
{{ if .Values.tls.existingSecret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{- /* Of the pods that answer clients: arguments, mounts and volumes of keys and certificates. */ -}}
{{- define "memserve.edgeArgs" -}}
{{- if include "memserve.keysName" . }}
- --api-key-file=/srv/memserve/keys/api-keys
{{- end }}
{{- if .Values.tls.existingSecret }}
- --tls-cert=/srv/memserve/tls/tls.crt
- --tls-key=/srv/memserve/tls/tls.key
{{- end }}
{{- end }}

{{- define "memserve.edgeEnv" -}}
{{- if .Values.metricsKey.existingSecret }}
- name: MEMSERVE_METRICS_KEY
  valueFrom: {secretKeyRef: {name: {{ .Values.metricsKey.existingSecret }}, key: {{ .Values.metricsKey.key }}}}
{{- end }}
{{- end }}

{{- define "memserve.edgeMounts" -}}
{{- if include "memserve.keysName" . }}
- {name: api-keys, mountPath: /srv/memserve/keys, readOnly: true}
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /srv/memserve/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "memserve.edgeVolumes" -}}
{{- with include "memserve.keysName" . }}
- name: api-keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: {{ $.Values.apiKeys.key }}, path: api-keys}]
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: tls, secret: {secretName: {{ .Values.tls.existingSecret }}, defaultMode: 0440}}
{{- end }}
{{- end }}

{{- define "memserve.scheduling" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "memserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "memserve.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOME
  value: /srv/memserve/cache
- name: MEMSERVE_CACHE_DIR
  value: /srv/memserve/cache
{{- end }}

{{- define "memserve.mounts" -}}
- {name: cluster-secret, mountPath: /srv/memserve/secret, readOnly: true}
- {name: cache, mountPath: /srv/memserve/cache}
- {name: run, mountPath: /srv/memserve/run}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "memserve.volumes" -}}
- name: cluster-secret
  secret:
    secretName: {{ include "memserve.secretName" . }}
    defaultMode: 0440
    items: [{key: {{ .Values.clusterSecret.key }}, path: cluster}]
- {name: cache, emptyDir: {}}
- {name: run, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
- {name: tmp, emptyDir: {}}
{{- end }}

{{- define "memserve.modelMount" -}}
{{- if .Values.model.volume }}
- {name: model, mountPath: /srv/memserve/model, readOnly: true}
{{- end }}
{{- end }}

{{- define "memserve.modelVolume" -}}
{{- with .Values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Probes of a member, by the file that it writes every second: docs/guides/HOSTS.md. */ -}}
{{- define "memserve.memberProbes" -}}
startupProbe:
  exec: {command: [test, -e, /srv/memserve/run/health]}
  periodSeconds: 2
  failureThreshold: 600
readinessProbe:
  exec: {command: [grep, -q, member, /srv/memserve/run/health]}
  periodSeconds: 2
  failureThreshold: 2
livenessProbe:
  exec: {command: [sh, -c, 'test -n "$(find /srv/memserve/run/health -mmin -1)"']}
  periodSeconds: 20
  failureThreshold: 3
{{- end }}
