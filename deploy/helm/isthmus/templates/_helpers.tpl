{{- define "isthmus.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "isthmus.labels" -}}
app.kubernetes.io/name: isthmus
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{ include "isthmus.selector" . }}
{{- end }}

{{- define "isthmus.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "isthmus.image" -}}
{{ .root.Values.image.repository }}-{{ .image }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "isthmus.config" -}}
{{- $root := .root }}
{{- $name := include "isthmus.name" $root }}
{{- $tls := dict }}
{{- if $root.Values.tls.secret }}
{{- $tls = dict "ca" "/etc/isthmus/tls/ca.crt" "cert" "/etc/isthmus/tls/tls.crt" "key" "/etc/isthmus/tls/tls.key" }}
{{- end }}
{{- $telemetry := dict "metrics_listen" "0.0.0.0:9464" "sample_ratio" $root.Values.telemetry.sampleRatio }}
{{- if $root.Values.telemetry.otlpEndpoint }}
{{- $_ := set $telemetry "otlp_endpoint" $root.Values.telemetry.otlpEndpoint }}
{{- end }}
{{- $coordinator := printf "%s-coordinator:50050" $name }}
{{- $base := dict
  "coordinator" (dict "listen" "0.0.0.0:50050")
  "router" (dict "listen" "0.0.0.0:50051" "http_listen" "0.0.0.0:8000" "coordinator" $coordinator "num_workers" $root.Values.router.processes)
  "worker" (dict "listen" "0.0.0.0:50060" "coordinator" $coordinator)
  "model" (dict "path" $root.Values.model.path "name" $root.Values.model.name)
  "transfer" (dict "backend" "nixl")
  "telemetry" $telemetry
  "logging" (dict "format" "json")
}}
{{- if $tls }}{{ $_ := set $base "tls" $tls }}{{ end }}
{{- if $root.Values.router.keysSecret }}
{{- $_ := set $base.router "clients" (dict "keys_file" "/etc/isthmus/keys/keys.yaml") }}
{{- end }}
{{- toYaml (mustMergeOverwrite $base (deepCopy $root.Values.config) (deepCopy (.config | default dict))) }}
{{- end }}

{{- define "isthmus.probes" -}}
{{- $command := list "python3" "-m" "isthmus_core.healthcheck" (printf "127.0.0.1:%d" (int .port)) "--config" "/etc/isthmus/config.yaml" }}
startupProbe:
  {{- if .root.Values.tls.secret }}
  exec: {command: {{ toJson $command }}}
  {{- else }}
  grpc: {port: {{ .port }}}
  {{- end }}
  periodSeconds: 5
  failureThreshold: {{ .patience }}
  timeoutSeconds: 5
readinessProbe:
  {{- if .root.Values.tls.secret }}
  exec: {command: {{ toJson $command }}}
  {{- else }}
  grpc: {port: {{ .port }}}
  {{- end }}
  periodSeconds: 5
  failureThreshold: 2
  timeoutSeconds: 5
{{- end }}

{{- define "isthmus.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "isthmus.pod" -}}
serviceAccountName: {{ include "isthmus.name" .root }}
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ .root.Values.terminationGracePeriodSeconds }}
securityContext:
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .part.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .part.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "isthmus.mounts" -}}
volumeMounts:
  - {name: config, mountPath: /etc/isthmus/config.yaml, subPath: {{ .component }}.yaml, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if .root.Values.tls.secret }}
  - {name: tls, mountPath: /etc/isthmus/tls, readOnly: true}
  {{- end }}
  {{- if and .root.Values.router.keysSecret (eq .component "router") }}
  # A folder, not a subPath: only that is changed in place when the Secret is.
  - {name: keys, mountPath: /etc/isthmus/keys, readOnly: true}
  {{- end }}
  {{- if .model }}
  - {name: models, mountPath: /models{{ if .root.Values.model.claim }}, readOnly: true{{ end }}}
  {{- end }}
  {{- if .shm }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
{{- end }}

{{- define "isthmus.volumes" -}}
volumes:
  - {name: config, configMap: {name: {{ include "isthmus.name" .root }}}}
  - {name: tmp, emptyDir: {}}
  {{- if .root.Values.tls.secret }}
  - {name: tls, secret: {secretName: {{ .root.Values.tls.secret }}}}
  {{- end }}
  {{- if and .root.Values.router.keysSecret (eq .component "router") }}
  - {name: keys, secret: {secretName: {{ .root.Values.router.keysSecret }}}}
  {{- end }}
  {{- if .model }}
  {{- if .root.Values.model.claim }}
  - {name: models, persistentVolumeClaim: {claimName: {{ .root.Values.model.claim }}, readOnly: true}}
  {{- else }}
  - {name: models, emptyDir: {sizeLimit: {{ .root.Values.model.fetchSize }}}}
  {{- end }}
  {{- end }}
  {{- if .shm }}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .shm }}}}
  {{- end }}
{{- end }}

{{- define "isthmus.fetch" -}}
{{- if not .root.Values.model.claim }}
initContainers:
  - name: model
    image: {{ include "isthmus.image" (dict "root" .root "image" "model") }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    args: [--model, {{ .root.Values.model.fetch | quote }}, --cache-dir, /models, --link, {{ .root.Values.model.path | quote }}]
    env:
      - {name: HF_HOME, value: /models/hub}
      {{- with .root.Values.model.tokenSecret }}
      - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: HF_TOKEN}}}
      {{- end }}
    volumeMounts:
      - {name: models, mountPath: /models}
      - {name: tmp, mountPath: /tmp}
    {{- include "isthmus.security" . | nindent 4 }}
{{- end }}
{{- end }}
